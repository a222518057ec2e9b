"""Time limits of tests that wait."""

LIMIT = 100.0
"""Longest wait of a test for another thread or process in seconds, for busy machines."""
