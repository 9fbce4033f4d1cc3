"""Definitions that at least two of the other folders share, in a file that imports nothing."""
