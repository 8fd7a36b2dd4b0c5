"""fddp's `DistributedDataParallel` in the place of torch's.

Only `torch.nn.parallel` is changed. In `torch.nn.parallel.distributed`, methods of torch's class
look up that class by its name, and dynamo holds it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack

import torch

from fddp import DistributedDataParallel

_STOCK = torch.nn.parallel.distributed.DistributedDataParallel
_LEFT_ALONE = ("torch", "fddp")  # packages that hold torch's class and go on doing so


def install(*, quiet: bool = False) -> ExitStack:
    """Replace `torch.nn.parallel.DistributedDataParallel` by fddp's class, and print that.

    Call it on all ranks, before importing a framework. Rank 0 prints a line to stderr. The result
    is a context that puts the earlier class back when it ends, and so does its method `close`.

    Args:
        quiet: neither print nor warn.

    Warns:
        UserWarning: modules have imported torch's class before, and keep it; the text names them.

    Example:
        >>> import torch
        >>> from fddp.integrations import install
        >>> with install(quiet=True):
        ...     torch.nn.parallel.DistributedDataParallel.__module__
        'fddp.ddp.wrapper'
        >>> torch.nn.parallel.DistributedDataParallel.__module__
        'torch.nn.parallel.distributed'
    """
    context, place = ExitStack(), torch.nn.parallel
    context.callback(setattr, place, "DistributedDataParallel", place.DistributedDataParallel)
    place.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
    if quiet:
        return context
    if os.environ.get("RANK", "0") == "0":
        print("fddp: torch.nn.parallel.DistributedDataParallel is now fddp's", file=sys.stderr)
    keeping = ", ".join(sorted(_keeping()))
    if keeping:
        warnings.warn(
            f"{keeping}: imported torch's DistributedDataParallel before install() and will use "
            f"it; call install() first, and for Lightning pass fddp's FddpStrategy",
            stacklevel=2,
        )
    return context


def _keeping() -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        held = getattr(module, "__dict__", {})
        keeps = any(held.get(key) is _STOCK for key in ("DistributedDataParallel", "DDP"))
        if keeps and name.partition(".")[0] not in _LEFT_ALONE:
            yield name
