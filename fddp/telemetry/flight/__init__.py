"""Flight recorder."""
