"""Typed bindings of the compiled extension."""
