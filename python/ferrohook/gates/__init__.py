"""Gates: hooks of a plan that depend on the model's own values at a token."""
