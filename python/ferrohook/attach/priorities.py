"""Extreme priorities of hooks."""

BEHIND_ALL = -(2**63)
"""Priority of a capture, which sees the results of all other hooks."""

AHEAD_OF_ALL = 2**63 - 1
"""Priority of hooks that must see each call begin."""
