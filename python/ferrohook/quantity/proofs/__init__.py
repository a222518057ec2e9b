"""Proofs of quantities: an equation for each kind."""
