"""Public faults of losses, clips, accumulation and counts: right on one rank, wrong on several."""
