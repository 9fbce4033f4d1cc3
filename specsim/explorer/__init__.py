"""Rounds of real generations, recorded phase by phase to be looked at."""
