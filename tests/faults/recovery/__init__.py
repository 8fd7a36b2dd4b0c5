"""Generated losses of ranks, from which the others go on by `rebuild`; judged by their logs."""
