"""Collectives on whole trees: operators that differentiate, and what carries them out."""
