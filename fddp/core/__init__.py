"""Values and pure functions: standard library and NumPy only."""
