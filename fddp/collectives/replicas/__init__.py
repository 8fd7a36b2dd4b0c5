"""Broadcast, comparison and reconciliation of replicas."""
