"""The model of an engine: its modules, and what forwards of a few tokens show of them."""
