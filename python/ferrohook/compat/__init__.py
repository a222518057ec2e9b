"""Other libraries' APIs on ferrohook's hooks: a package for each, imported separately."""
