"""Transport over any backend of torch.distributed."""
