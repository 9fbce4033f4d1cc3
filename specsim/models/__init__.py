"""Weights: read from checkpoints, shipped, or made on the spot."""
