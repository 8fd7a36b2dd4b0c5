"""Random numbers of virtual ranks."""

from __future__ import annotations

import hashlib
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from fddp.core.entrance import entrance
from fddp.errors import ReentryError

if TYPE_CHECKING:
    from typing_extensions import Self

# torch's default generators belong to the process.
_IN_USE = threading.RLock()


@entrance
def virtual_rng(step: int, virtual_rank: int, *, seed: int = 0) -> VirtualRng:
    """Return random numbers that depend on the arguments alone, whatever the number of ranks.

    Args:
        step: number of the step, from 0; over all epochs.
        virtual_rank: number of the virtual rank.
        seed: seed of the run.

    Raises:
        TypeError: a number is no integer.
        ValueError: a number is negative.

    Example:
        >>> import fddp, torch
        >>> with fddp.virtual_rng(step=3, virtual_rank=1):
        ...     one = torch.nn.functional.dropout(torch.ones(100))
        >>> other = torch.empty(100).bernoulli_(generator=fddp.virtual_rng(3, 1).generator()) * 2
        >>> torch.equal(one, other)
        True
    """
    for name, number in (("step", step), ("virtual_rank", virtual_rank), ("seed", seed)):
        if not hasattr(number, "__index__"):
            raise TypeError(f"{name} must be an int, got {number!r}")
        if number < 0:
            raise ValueError(f"{name} must be at least 0, got {number}")
    return VirtualRng(derived_seed("step", *map(int, (seed, step, virtual_rank))))


class VirtualRng:
    """Source of random numbers; made by `virtual_rng`.

    As a context manager, it seeds torch's default generators of the CPU and of accelerators, which
    dropout uses, and restores their states in the end. Default generators belong to the process:
    ranks that are threads of one process take turns through `generator` instead.

    Attributes:
        seed: seed of the generators, below 2**63.

    Raises on entering:
        ReentryError: another thread is within a block.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._stack = ExitStack()

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a new generator on a device."""
        return torch.Generator(device).manual_seed(self.seed)

    def __enter__(self) -> Self:
        if not _IN_USE.acquire(blocking=False):
            raise ReentryError(
                "another thread is within a block of virtual_rng, and torch's default generators "
                "belong to the process; pass virtual_rng(...).generator() to random operations"
            )
        self._stack.callback(_IN_USE.release)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        devices = () if accelerator is None else range(torch.accelerator.device_count())
        kind = "cuda" if accelerator is None else accelerator.type
        self._stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
        torch.manual_seed(self.seed)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def derived_seed(*parts: int | str) -> int:
    """Return a seed below 2**63 that depends on the parts alone.

    Example:
        >>> derived_seed("step", 0, 1, 2) == derived_seed("step", 0, 1, 2)
        True
        >>> derived_seed("step", 0, 1, 2) == derived_seed("step", 0, 12)
        False
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
