"""Batch invariance: a request's tokens do not depend on the other requests of its batch."""
