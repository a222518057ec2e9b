"""What all rooms share: checks of arguments, texts, structures of tensors, streams."""
