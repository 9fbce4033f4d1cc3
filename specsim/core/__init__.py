"""Definitions that at least two of the other folders share; this file imports nothing."""
