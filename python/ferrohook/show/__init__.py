"""Summaries, profiles and the watch for NaN."""
