"""Gates: hooks of a plan that depend on what the model computes at a token."""
