"""`check_replication` on training loops, and on mutants of them."""
