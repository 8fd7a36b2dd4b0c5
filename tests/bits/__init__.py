"""Record of results to the bit, of collectives, and of plans and schedules: `make bits`."""
