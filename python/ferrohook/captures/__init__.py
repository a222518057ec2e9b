"""Captures: recorders, the values that they kept, and caches to read them."""
