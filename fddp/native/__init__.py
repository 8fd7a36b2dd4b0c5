"""What Python adds to the compiled extension."""
