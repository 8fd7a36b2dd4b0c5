"""Steps of fddp beside those of torch DDP, in one launch of 2 ranks."""
