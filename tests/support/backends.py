"""Groups with the backend "fddp" beside gloo, on the ranks of `tests.support.ranks`."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
NUMBERS = (*FLOATS, *INTEGERS)
# Elements: none, one, an odd number, more than is copied, more than a segment of float32.
SIZES = (0, 1, 77, 40_001, 300_007)


def new_fddp_group(timeout_s: float = 60.0) -> dist.ProcessGroup:
    """A group of all ranks with the backend "fddp"; a collective call."""
    group = dist.new_group(backend="fddp", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group


def as_default(rank: int, world_size: int, folder: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn(rank, world_size)` in a default group with the backend "fddp"."""
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("fddp", store=store, rank=rank, world_size=world_size)
    result = fn(rank, world_size, *args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def values(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact in every dtype."""
    numbers = (torch.arange(size) * 7 + rank * 3 + seed) % 3 + 1
    return numbers.to(dtype) * (1 + 1j) if dtype.is_complex else numbers.to(dtype)


def check_equal(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    """Compare bitwise, and by dtype and shape."""
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), (one, other)
