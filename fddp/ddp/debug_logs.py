"""Messages of torch's reducer, on the logger "fddp".

Torch logs most of them only if the environment variable TORCH_DISTRIBUTED_DEBUG is INFO or DETAIL.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

import torch.distributed as dist

_log = logging.getLogger("fddp")


def log_initialised(cap_bytes: int, first_cap_bytes: int) -> None:
    """Log the caps of the buckets."""
    if dist.get_debug_level() != dist.DebugLevel.OFF:
        _log.info(
            "Reducer initialized with bucket_bytes_cap: %d first_bucket_bytes_cap: %d",
            cap_bytes,
            first_cap_bytes,
        )


def log_rebuilt(buckets: int, caps_bytes: Sequence[int]) -> None:
    """Log that the plan follows the order in which gradients arrived."""
    _log.info("Reducer buckets have been rebuilt in this iteration.")
    if dist.get_debug_level() != dist.DebugLevel.OFF:
        last = len(caps_bytes) - 1
        limits = ", ".join(str(caps_bytes[min(bucket, last)]) for bucket in range(buckets))
        _log.info("%d buckets rebuilt with size limits: %s bytes.", buckets, limits)


def log_builtin_hook(name: str) -> None:
    """Log that a hook of torch's reducer was registered."""
    _log.info("Built-in communication hook %s is registered.", name)


def log_unused(
    unused: Collection[str], order: Iterable[str], rank: int, *, is_first_static: bool
) -> None:
    """Log the parameters that this rank did not use in a step.

    Args:
        unused: their names.
        order: all names, in the order of registration.
        rank: this rank.
        is_first_static: True for the first step of a static graph.
    """
    if not unused or dist.get_debug_level() == dist.DebugLevel.OFF:
        return
    numbered = [(name, index) for index, name in enumerate(order) if name in unused]
    if is_first_static:
        listed = "".join(f"{{{name},{index}}}" for name, index in numbered)
        _log.info(
            "[Rank %d]: Parameter(s) (in the format of {param_name, index}): %s is(are) unused "
            "during first iteration. Since static_graph=True is enabled for DDP, we expect this "
            "set of unused parameters to remain consistent on this rank throughout the training.",
            rank,
            listed,
        )
        return
    for name, index in numbered:
        _log.info("[Rank %d]: Parameter %s at index %d is marked as unused.", rank, name, index)
