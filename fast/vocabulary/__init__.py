"""Passes over the vocabulary."""
