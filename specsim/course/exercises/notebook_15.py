"""Exercises of notebook 15: bring your own kernel, drafter, verifier."""

from specsim.course.exercises.own_drafter import PROPOSE
from specsim.course.exercises.own_kernel import VERIFY
from specsim.course.exercises.own_rule import FOLLOW

EXERCISES = (FOLLOW, PROPOSE, VERIFY)
