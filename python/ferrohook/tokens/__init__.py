"""Tokens of a model's calls: positions, what tells them, and hooks that find them."""
