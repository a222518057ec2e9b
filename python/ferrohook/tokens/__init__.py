"""Tokens of a model's calls: positions, their sources, and hooks that find them."""
