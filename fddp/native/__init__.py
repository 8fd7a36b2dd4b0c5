"""Python parts of the compiled extension."""
