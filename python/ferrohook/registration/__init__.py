"""Registration of hooks: by name, for scopes, and the list of those there are."""
