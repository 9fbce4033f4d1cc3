"""Verifiers: each accepts a path of every tree."""
