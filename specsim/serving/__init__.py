"""Serving of requests: the scheduler, the runner, and generate()."""
