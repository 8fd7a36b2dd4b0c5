"""Bucket plans."""
