"""Helpers of all rooms: checks of arguments, texts, structures of tensors, streams."""
