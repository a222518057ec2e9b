"""Effects: interventions with their formulas, and typed hooks."""
