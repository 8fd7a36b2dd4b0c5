"""Execution of one step."""
