"""Weights of small test models: one file for each kind of drafter, and what they share."""
