"""Lifetime of threads, forked processes and dropped transports."""
