"""Effects: interventions, a class with a formula each, parts of values, and typed hooks."""
