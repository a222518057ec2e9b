"""Priorities at the ends of the order of hooks."""

BEHIND_ALL = -(2**63)
"""That of a capture: it sees what leaves the other hooks."""

AHEAD_OF_ALL = 2**63 - 1
"""That of hooks which have to see each call begin."""
