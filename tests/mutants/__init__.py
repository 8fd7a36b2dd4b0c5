"""Mutants of the product, and the tests that kill them: `make mutants`."""
