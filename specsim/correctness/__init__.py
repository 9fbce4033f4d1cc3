"""Checks that try to show the engines wrong."""
