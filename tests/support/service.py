"""Time limit of the tests of the service."""

LIMIT = 30.0
"""Seconds that a test waits at most for something."""
