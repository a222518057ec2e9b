"""Stores of collected tensors: on disk and in memory."""
