"""Groups of the ranks that are left after a loss.

Each such group knows the first one from which it comes: there ranks meet that agree on who is left,
also if one of them has a group that another failed to make, and errors number ranks as there.

[Note: groups of rebuilds] torch keeps a group until it is destroyed, with its sockets and threads.
A group that `group_left` made is destroyed when what has made it goes on with another one, which
all ranks have opened by then. A rank that failed to open it keeps it until then as well: others may
be about to open it, and would take this rank for lost. It stays as long as anything else may go on
from it.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from fddp.errors import FddpError, RankLostError, error_text
from fddp.transport.c10d.rendezvous import call_with_checks
from fddp.transport.group_backend import backend_of
from fddp.transport.liveness.bounded_store import BoundedStore, client_of
from fddp.transport.liveness.interrupts import from_user_code
from fddp.transport.liveness.survivors import agree_on_left
from fddp.transport.torch_private import (
    destroy,
    name_of,
    new_named_group,
    process_groups,
    store_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator


class FirstGroup(NamedTuple):
    """The first group from which a group comes.

    Attributes:
        name: its name in torch.
        store: its store.
        members: its ranks in the job.
        numbers: numbers there of the ranks of the group.
    """

    name: str
    store: dist.Store
    members: tuple[int, ...]
    numbers: tuple[int, ...]


_SILENT = (
    "the group's store does not answer, so the rank or agent that hosts it is stopped or gone: "
    "resume it"
)
_ANNOUNCING_S = 10.0  # limit of a request that nobody waits for
_MAKING_S, _MAKING_S_PER_RANK = 10.0, 0.1  # longest that ranks try to make a group
_firsts: weakref.WeakKeyDictionary[Any, FirstGroup] = weakref.WeakKeyDictionary()
# By group that `group_left` made, what may go on from it.
_users: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def first_of(group: dist.ProcessGroup) -> FirstGroup:
    """Return the first group from which a group comes: itself, if `group_left` did not make it."""
    found = _firsts.get(group)
    if found is not None:
        return found
    members = tuple(dist.get_process_group_ranks(group))
    return FirstGroup(name_of(group), store_of(group), members, tuple(range(len(members))))


def group_left(
    group: dist.ProcessGroup,
    find_lost: Callable[[Collection[int]], Collection[int]],
    find_ended: Callable[[], Collection[int]],
    timeout_s: float,
    group_timeout_s: float,
) -> dist.ProcessGroup:
    """Return a group of the ranks that are left of a group; a collective call of theirs. It is the
    group itself if no rank of the first one is lost.

    Args:
        group: the group.
        find_lost: returns those of some ranks of the group that are known to be lost.
        find_ended: returns ranks of the group whose process has ended.
        timeout_s: time limit of the call.
        group_timeout_s: time limit of operations of the new group.

    Raises:
        RankLostError: another rank was lost meanwhile, or the others went on without this one.
        SyncTimeoutError: some ranks did not make the call, and are not known to be lost.
    """
    first = first_of(group)
    own = first.numbers[dist.get_rank(group)]
    place = {number: rank for rank, number in enumerate(first.numbers)}

    def lost(numbers: Collection[int]) -> set[int]:
        found = find_lost([place[number] for number in numbers])
        return {*(first.numbers[rank] for rank in found), *_leaving(store, numbers)}

    store = _store(group, first)
    with _as_lost(f"rank {own} asked which ranks are left, and {_SILENT}"):
        left, attempt = agree_on_left(store, own, first.numbers, lost, timeout_s)
    if len(left) == len(first.members):
        return group

    def check() -> None:
        gone = tuple(first.numbers[rank] for rank in find_ended() if first.numbers[rank] in left)
        if gone:
            raise RankLostError(
                f"rank {own} made a group of ranks {', '.join(map(str, left))}, which are left, "
                f"and lost rank {', '.join(map(str, gone))} meanwhile; call again",
                gone,
            )

    ranks = [first.members[number] for number in left]
    # A rank of another host that has ended is noticed by the next agreement alone.
    making_s = min(timeout_s, _MAKING_S + _MAKING_S_PER_RANK * len(ranks))
    name, limit = f"{first.name}, left by {attempt}", timedelta(seconds=making_s)
    with _as_lost(
        f"rank {own} could not make a group of ranks {', '.join(map(str, left))}; call again"
    ):
        # gloo waits for its ranks until its time limit, whatever happens to them.
        make = partial(new_named_group, group, ranks, name, limit)
        made: dist.ProcessGroup = call_with_checks(make, making_s, check)
    for device in made._device_types:
        backend, limit = backend_of(made, device), timedelta(seconds=group_timeout_s)
        try:
            backend.set_timeout(limit)
        except RuntimeError:  # of NCCL, whose operations read it from the options
            if hasattr(backend, "options"):
                backend.options._timeout = limit
    _firsts[made] = first._replace(numbers=left)
    _users[made] = weakref.WeakSet()
    return made


def hold(group: dist.ProcessGroup, user: object) -> None:
    """Keep a group that `group_left` made as long as `user` exists and has not dropped it. Does
    nothing with other groups, which belong to the caller."""
    if group in _users:
        _users[group].add(user)


def drop(group: dist.ProcessGroup, user: object) -> None:
    """Destroy a group that `group_left` made, unless something else may go on from it; see [Note:
    groups of rebuilds]. Not a collective call."""
    users = _users.get(group)
    if users is None:
        return
    users.discard(user)
    if not users and group in process_groups():
        destroy(group)


def announce_leave(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Note in the store that this rank will not be among those that are left of a group."""
    first = first_of(group)
    own = first.numbers[dist.get_rank(group)]
    with _as_lost(f"rank {own} leaves, and {_SILENT}"):
        _store(group, first).within(min(timeout_s, _ANNOUNCING_S)).set(f"leaving/{own}", "")


def ranks_leaving(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the numbers of the ranks of a group that have announced their leave."""
    first = first_of(group)
    with _as_lost(f"a rank has left, and {_SILENT}"):
        return _leaving(_store(group, first), first.numbers)


def _leaving(store: BoundedStore, numbers: Collection[int]) -> tuple[int, ...]:
    return tuple(number for number in numbers if store.check([f"leaving/{number}"]))


def _store(group: dist.ProcessGroup, first: FirstGroup) -> BoundedStore:
    return BoundedStore(first.store, client_of(group)).prefixed("fddp/left")


@contextmanager
def _as_lost(what: str) -> Iterator[None]:
    """Raise errors of backends and stores as `RankLostError`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, FddpError) or from_user_code(error):
            raise
        raise RankLostError(
            f"{what}, or start the job again from a checkpoint ({error_text(error)})"
        ) from error
