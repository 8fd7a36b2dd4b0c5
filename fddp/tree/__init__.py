"""Pytrees to leaves and back."""
