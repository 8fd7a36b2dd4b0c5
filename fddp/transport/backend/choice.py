"""The way in which the ranks of a group communicate: shared memory within a host, else gloo."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch.distributed as dist

from fddp.transport.shm.opening import open_shm_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fddp._C import ShmBackend
    from fddp.transport.backend.store_exchange import StoreExchange
    from fddp.transport.shm.host_discovery import HostGroups

_log = logging.getLogger("fddp")


class BackendChoice(NamedTuple):
    """The way in which the ranks of a process group communicate, the same on all of them.

    Attributes:
        name: "shm" for shared memory if all ranks share it, else "gloo".
        reason: why this way was chosen, in a few words.
    """

    name: Literal["shm", "gloo"]
    reason: str


ALONE = BackendChoice("shm", "the group has only one rank")
_choices: dict[str, BackendChoice] = {}
"""By name of the process group."""


def note_choice(name: str, rank: int, size: int, choice: BackendChoice) -> None:
    """Keep the choice for the group of this name, and log it."""
    _choices[name] = choice
    _log.info("rank %d of %d: backend %s, because %s", rank, size, choice.name, choice.reason)


def noted_choice(name: str) -> BackendChoice | None:
    """Return the choice for the group of this name."""
    return _choices.get(name)


def open_in_memory(
    exchange: StoreExchange, host_groups: HostGroups, timeout_s: float
) -> tuple[ShmBackend | None, BackendChoice]:
    """Return a backend in the memory of the ranks, None if they do not all share it; a collective
    call of `exchange`. `timeout_s` is the time limit of its operations."""
    size = exchange.world_size
    everyone = tuple(range(size))
    problems = host_groups.problems
    if host_groups.hosts == (everyone,):
        opened = open_shm_groups(exchange, host_groups, [everyone], timeout_s)
        if everyone in opened.everywhere:
            reason = f"all {size} ranks share the memory of a host"
            return opened.own[everyone], BackendChoice("shm", reason)
        problems = {**problems, **opened.problems}
    return None, BackendChoice("gloo", host_groups.describe(problems))


def open_over_gloo(
    store: dist.Store, rank: int, ranks: Sequence[int], name: str, timeout_s: float
) -> dist.ProcessGroupGloo:
    """Return a backend of gloo.

    Args:
        store: part of the group's store for this backend only.
        rank: this rank's number in the group.
        ranks: numbers of its ranks in the default group.
        name: of the group.
        timeout_s: time limit of the connection and of operations, in seconds.
    """
    store = dist.PrefixStore("gloo", store)
    backend = dist.ProcessGroupGloo(store, rank, len(ranks), timedelta(seconds=timeout_s))
    # As torch does. Gloo reads the ranks when it is split; none stand for all.
    options: Any = backend.options
    options.global_ranks_in_group = list(ranks)
    options.group_name = name
    return backend
