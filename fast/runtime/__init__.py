"""Launches, the interpreter, recorded graphs and in-kernel random numbers."""
