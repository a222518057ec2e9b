"""Anatomy of a model: the stacks, blocks and sublayers that looks at it show."""
