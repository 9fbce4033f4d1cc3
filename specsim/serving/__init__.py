"""Requests served: the scheduler, the runner, and generate()."""
