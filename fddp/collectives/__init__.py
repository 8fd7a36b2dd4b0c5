"""Collectives on pytrees: differentiable operators and their execution."""
