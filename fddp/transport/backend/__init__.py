"""The backend "fddp" of `torch.distributed`: its process groups use the memory of a host."""

from fddp.transport.backend.choice import BackendChoice as BackendChoice
from fddp.transport.backend.creation import backend_choice as backend_choice
