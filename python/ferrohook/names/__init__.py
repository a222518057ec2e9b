"""Names: selectors of modules, names of quantities, and the places that they stand for."""
