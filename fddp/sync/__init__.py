"""GradSync, and tools around it in a training loop."""
