"""Checks that try to prove the engines wrong."""
