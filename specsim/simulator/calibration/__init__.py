"""Calibration of the cost model from benchmark files, and profiles that keep the result."""
