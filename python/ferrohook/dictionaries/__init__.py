"""Dictionaries: sparse autoencoders and transcoders, and the features that they find."""
