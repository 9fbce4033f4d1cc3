"""Formats of drafters' checkpoints: everything about the files of a kind, in one file for a kind or a family."""
