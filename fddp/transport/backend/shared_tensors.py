"""Tensors in shared memory, which collectives of the backend "fddp" use where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fddp.core.entrance import entrance
from fddp.transport.group_backend import backend_of


@entrance
def empty_shared(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Allocate an uninitialized tensor in the memory that the ranks of a group share.

    The group's collectives read and write it where it is, and so do those of groups that are made
    of its ranks; other tensors are copied through a staging buffer. A rank may allocate tensors
    alone. The tensor can be used like any other, and may outlive the group.

    The memory is ordinary if the group does not share any (it has one rank, or goes through gloo),
    in a forked process, and if the machine has no pages left.

    Args:
        size: shape: integers, or one sequence of them.
        dtype: None for torch's default dtype.
        device: None or the CPU.
        group: a group with the backend "fddp". None for the default group.

    Raises:
        ValueError: the group does not exist any more or has another backend, the device is not the
            CPU, or a size is negative.

    Example:
        >>> import fddp
        >>> dist.init_process_group("fddp", store=dist.HashStore(), rank=0, world_size=1)
        >>> gradients = fddp.empty_shared(2, 3).fill_(1.0)
        >>> dist.all_reduce(gradients)
        >>> gradients
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
        >>> dist.destroy_process_group()
    """
    given: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    shape = torch.Size(given)
    if any(length < 0 for length in shape):
        raise ValueError(f"a size must not be negative, got {tuple(shape)}")
    cpu = torch.device("cpu")
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"shared memory is on the CPU, got device {str(device)!r}")
    dist.get_backend(group)  # refuses groups that do not exist
    if "fddp" not in dist.get_backend_config(group):
        raise ValueError(f'the group {group!r} does not have the backend "fddp"')
    resolved = dist.group.WORLD if group is None else group
    assert resolved is not None
    dtype = torch.get_default_dtype() if dtype is None else dtype
    backend = backend_of(resolved, cpu)
    if not backend.supports_tensor_alloc(cpu):
        return torch.empty(shape, dtype=dtype, device=cpu)
    allocated: torch.Tensor = backend.allocate_tensor(shape.numel(), dtype=dtype, device=cpu)
    return allocated.resize_(shape)
