"""Transport over shared memory, for ranks of one host."""
