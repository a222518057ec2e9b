"""Time limits of tests that wait."""

LIMIT = 100.0
"""Seconds that a test waits at most for another thread or process, on a busy machine too."""
