"""Hostile arguments for the compiled extension, and the commands that feed them: `make fuzz`."""
