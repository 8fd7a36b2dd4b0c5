"""Reduction schedules."""
