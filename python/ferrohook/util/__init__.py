"""What all rooms share: errors, checks of arguments, texts, structures of tensors, streams."""
