"""The backend "fddp" of `torch.distributed`: its process groups use the memory of a host."""
