"""Launches, the interpreter, captured graphs and in-kernel random numbers."""
