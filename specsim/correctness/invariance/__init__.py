"""Batch invariance: a request's tokens do not depend on the requests beside it."""
