"""Failure detection: status of the other ranks."""
