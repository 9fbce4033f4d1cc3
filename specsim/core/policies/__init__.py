"""Policies that choose the setting of every round: pure and deterministic, for serving and the simulator."""
