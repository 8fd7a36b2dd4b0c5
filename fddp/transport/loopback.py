"""N ranks as threads of one process, with real numerics: for notebooks, tests and doctests.

Semantics are those of a network: operations are asynchronous, are matched by issue order and time
out, and a rank that raises or returns early is lost to the others. In addition, mismatched
operations are detected on every rank, and sums run in rank order, so that their bits are
reproducible.
"""

from __future__ import annotations

import contextvars
import threading
import time
import weakref
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from fddp.core.entrance import entrance
from fddp.errors import (
    ClosedError,
    DesyncError,
    FddpError,
    RankLostError,
    SyncTimeoutError,
)
from fddp.transport.base import Transport, Work
from fddp.transport.liveness.failure import Failure, check_titles, mismatch_error, to_error
from fddp.transport.liveness.status import MAX_RANKS_SHOWN, RankStatus, StatusBoard, format_statuses
from fddp.transport.tree_sum import sum_along_tree_

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch import Tensor

    from fddp.transport.operation import Operation

T = TypeVar("T")


@entrance
def loopback(world_size: int, fn: Callable[..., T], *args: Any, timeout_s: float = 60.0) -> list[T]:
    """Run `fn(group, *args)` on `world_size` ranks, each a thread; return their results by rank.

    Args:
        world_size: number of ranks, 1 or more.
        fn: called with this rank's `LoopbackGroup` (`group.rank`, `group.size`) and `args`.
        timeout_s: time limit of one collective.

    Raises:
        The first exception that a rank raised, with a note that names the rank. The other ranks
        see that rank as lost and end too.

    Ranks share the objects that `fn` closes over. Each rank needs its own copy of a module whose
    parameters are swapped during a call, as by `torch.func.functional_call`. Forward-mode levels in
    torch are global to a process, so `torch.func.jvp`, `jacfwd` and `hessian` can't run on two of
    these ranks at the same time. Pass `preserve_rng_state=False` to checkpoints: torch can deadlock
    where several threads ask for the state of its default generator while Python collects garbage.

    >>> def mean_of_ranks(group):
    ...     with LoopbackTransport(group) as transport:
    ...         total = torch.tensor([float(group.rank)])
    ...         transport.all_reduce(total).wait("the sum")
    ...         return total.item() / group.size
    >>> loopback(4, mean_of_ranks)
    [1.5, 1.5, 1.5, 1.5]
    """
    __tracebackhide__ = True  # of pytest: the error is that of a rank
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: a loopback group needs at least one rank")
    return run_ranks(LoopbackState(world_size, timeout_s), fn, *args)


def run_ranks(state: LoopbackState, fn: Callable[..., T], *args: Any) -> list[T]:
    """Run `fn(group, *args)` on the ranks of a state, as `loopback`."""
    __tracebackhide__ = True
    world_size = state.size
    results: dict[int, T] = {}
    failures: list[tuple[int, BaseException]] = []  # in chronological order

    def run(rank: int) -> None:
        __tracebackhide__ = True
        reason = "returned"
        try:
            results[rank] = fn(LoopbackGroup(rank, state), *args)
        except BaseException as error:
            failures.append((rank, error))
            reason = f"raised {error!r}"
        finally:
            state.leave(rank, reason)

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(run, rank),
            name=f"fddp-loopback-{rank}",
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, error = failures[0]
        # The attribute that `BaseException.add_note` sets; Python 3.10 lacks the method.
        note = f"raised on rank {rank} of {world_size} of a loopback group"
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
        raise error
    return [results[rank] for rank in range(world_size)]


class LoopbackGroup:
    """One rank's view of a loopback group, created by `loopback` and accepted as a group.

    Attributes:
        rank: this thread's rank.
        size: number of ranks in the group.
        state: shared by its ranks.
    """

    def __init__(self, rank: int, state: LoopbackState) -> None:
        self.rank = rank
        self.size = state.size
        self.state = state
        self._opened = 0
        self._named: Counter[str] = Counter()
        state.boards[rank] = ThreadStatusBoard(state.abandoned)

    def __repr__(self) -> str:
        return f"LoopbackGroup(rank={self.rank}, size={self.size})"


def group_of_one(owner: object, timeout_s: float) -> LoopbackGroup:
    """Return a group of this rank alone, the same one for as long as `owner` lives."""
    return _groups_of_one.setdefault(owner, LoopbackGroup(0, LoopbackState(1, timeout_s)))


_groups_of_one: weakref.WeakKeyDictionary[Any, LoopbackGroup] = weakref.WeakKeyDictionary()

DEFAULT_GROUP: contextvars.ContextVar[LoopbackGroup | None] = contextvars.ContextVar(
    "fddp_default_group", default=None
)
"""Group for `group=None` in place of the default group of `torch.distributed`; see `mirror.py` and
`turns.py`."""


class ThreadStatusBoard(StatusBoard):
    """Status board of a rank that is a thread; `abandoned_keys` are those of all ranks."""

    def __init__(self, abandoned_keys: set[str]) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._abandoned_keys = abandoned_keys

    def publish_abandoned(self, key: str) -> None:
        self._abandoned_keys.add(key)

    def find_abandoned(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key in self._abandoned_keys]

    def own_status(self, main_thread: int | None = None) -> RankStatus:
        return super().own_status(self._thread)


class LoopbackTransport(Transport):
    """A separate tag space within a loopback group."""

    name = "loopback"
    reason = "the ranks are threads of one process"

    def __init__(
        self, group: LoopbackGroup, timeout_s: float | None = None, title: str = "transport"
    ) -> None:
        self.rank = group.rank
        self.world_size = group.size
        self.timeout_s = group.state.timeout_s if timeout_s is None else timeout_s
        self.control_device = torch.device("cpu")
        self._state, self._group = group.state, weakref.ref(group)
        self._issued: Counter[tuple[int, ...]] = Counter()  # operations by participants
        # The n-th transport of a rank is matched with the n-th of every other rank.
        self._channel = group._opened
        self._board = self._state.boards[self.rank]
        self.status = self._board.open(str(self._channel))
        self.status.read_step_failure = partial(self._state.read_step_failure, self._channel)
        self.status.begin(f"the opening of a {title}")
        peer = partial(self._board.step_failure, self.status)
        missing = self._state.open(self._channel, self.rank, title, self.timeout_s, peer)
        if missing:
            failure = peer()
            self._board.leave(self.status)
            raise self._explain("opening a loopback transport", missing, failure)
        group._opened += 1
        try:
            check_titles(self._state.titles(self._channel))
        except DesyncError:
            self.close()
            raise
        group._named[title] += 1
        self.status.label = f"{title} #{group._named[title]}"
        self.status.finish("the opening")

    def group_left(self) -> LoopbackGroup | None:
        return self._group()

    def _start(self, operation: Operation) -> Work:
        position = self._issued[operation.ranks]
        self._issued[operation.ranks] += 1
        key = CollectiveKey(self._channel, operation.ranks, position)
        rendezvous = self._state.join(key, self.rank, operation)
        return _LoopbackWork(self, rendezvous, operation.record_time)

    def _connect(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Do nothing: any group of threads can communicate."""

    def publish_step_failure(self, step: int, text: str) -> None:
        self._state.publish_step_failure(self._channel, step, f"rank {self.rank} failed: {text}")

    def _release(self) -> None:
        self._board.leave(self.status)
        self._state.leave(self.rank, f"left its transport ({self.closed_by})", self._channel)

    def _explain(
        self, what: str, missing: dict[int, str | None], peer: str | None = None
    ) -> FddpError:
        """Return the error of `what`, given the missing ranks or the failed step of a peer."""
        where = f"{what} on rank {self.rank} of {self.world_size}"
        failure = Failure("", late=True, silent=self._not_responding(missing), peer=peer or "")
        gone = {rank: reason for rank, reason in missing.items() if reason is not None}
        expired = any((rank, self._channel) in self._state.gave_up for rank in gone)
        if not peer and gone and not expired:
            reasons = ", ".join(f"rank {rank} {reason}" for rank, reason in gone.items())
            return RankLostError(
                f"{where}: lost {reasons}; fix that rank's own error first", tuple(gone)
            )
        others = [rank for rank in range(self.world_size) if rank not in missing]
        boards = self._state.boards
        some = sorted(rank for rank in [*missing, *others] if rank in boards)[:MAX_RANKS_SHOWN]
        statuses = format_statuses({f"rank {rank}": boards[rank].own_status() for rank in some})
        failure = failure._replace(statuses=statuses)

        def names(ranks: tuple[int, ...]) -> str:
            return ", ".join(f"rank {rank}" for rank in ranks)

        return to_error(failure, where, names, self.timeout_s)

    def _not_responding(self, missing: Collection[int]) -> tuple[int, ...]:
        """Return the ranks to name where some are `missing`: not those that wait themselves, but
        those for which they do."""
        state, channel = self._state, self._channel
        waiting = {
            rank
            for rank, board in state.boards.items()
            if (rank, channel) in state.gave_up or self.status.key in board.own_status().awaits
        }
        return tuple(sorted({*missing, *state.awaited(channel)} - waiting))


class _LoopbackWork(Work):
    def __init__(
        self, transport: LoopbackTransport, rendezvous: Rendezvous, record_time: bool
    ) -> None:
        self._transport = transport
        self._rendezvous = rendezvous
        self._record_time = record_time
        self._error: FddpError | None = None

    @property
    def done(self) -> bool:
        return bool(self._transport.closed_by) or self._transport._state.is_over(self._rendezvous)

    @property
    def done_s(self) -> float | None:
        return self._rendezvous.done_s if self._record_time else None

    def _wait(self, what: str) -> None:
        if self._error is None:
            self._error = self._outcome(what)
        if self._error is not None:
            raise self._error

    def _outcome(self, what: str) -> FddpError | None:
        transport, rendezvous = self._transport, self._rendezvous
        rendezvous.what = what
        where = f"{what} on rank {transport.rank} of {transport.world_size}"
        status = transport.status
        status.begin(what)
        peer = partial(transport._board.step_failure, status)
        missing = transport._state.wait(
            rendezvous, transport.timeout_s, lambda: transport.closed_by or peer()
        )
        if transport.closed_by and rendezvous.done_s is None:
            return ClosedError(f"{where}: the transport was closed ({transport.closed_by})")
        if rendezvous.mismatch is not None:
            return mismatch_error(where, rendezvous.mismatch)
        if not missing:
            status.finish(what)
            return None
        mismatch = transport._state.mismatches.get(rendezvous.key[:2])
        if any(missing.values()) and mismatch:
            # Operations after a mismatch are never matched.
            error: FddpError = mismatch_error(where, mismatch)
        else:
            error = transport._explain(what, missing, peer())
        status.fail(what)
        if isinstance(error, SyncTimeoutError):
            transport._state.gave_up.add((transport.rank, transport._channel))
        transport.close(f"{what} failed")
        return error


class CollectiveKey(NamedTuple):
    """Identity of a collective, equal on all its ranks."""

    channel: int  # the transport
    ranks: tuple[int, ...]
    position: int  # among the operations of these ranks on this transport


class Rendezvous:
    """Operations of the ranks that have joined a collective, and the description of the first that
    waited for it. Guarded by `LoopbackState._changed`."""

    def __init__(self, key: CollectiveKey) -> None:
        self.key = key
        self.what = ""
        self.operations: dict[int, Operation] = {}
        self.mismatch: str | None = None
        self.done_s: float | None = None


class LoopbackState:
    """State that the ranks of a loopback group share."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._openings: dict[int, dict[int, str]] = {}
        self._rendezvous: dict[CollectiveKey, Rendezvous] = {}
        self._exits: dict[tuple[int, int | None], str] = {}  # by rank and channel; None: all
        self.gave_up: set[tuple[int, int]] = set()  # ranks and channels, after a time limit
        self.mismatches: dict[tuple[int, tuple[int, ...]], str] = {}  # by channel and ranks
        self._step_failures: dict[int, tuple[int, str]] = {}  # step and error by channel
        self.boards: dict[int, StatusBoard] = {}  # by rank
        self.abandoned: set[str] = set()  # keys of transports; never removed

    def open(
        self,
        channel: int,
        rank: int,
        title: str,
        timeout_s: float,
        aborted: Callable[[], object | None],
    ) -> dict[int, str | None]:
        """Wait for all ranks to open `channel`, as `wait` does. Withdraw on failure."""
        with self._changed:
            present = self._openings.setdefault(channel, {})
            present[rank] = title
            self._changed.notify_all()

            def missing() -> dict[int, str | None]:
                return self._missing(range(self.size), present, channel)

            self._changed.wait_for(
                lambda: self._is_settled(missing()) or aborted() is not None, timeout_s
            )
            if absent := missing():
                present.pop(rank, None)
            return absent

    def awaited(self, channel: int) -> set[int]:
        """Return the ranks that have not joined some collective of a channel."""
        with self._changed:
            open_ones = [one for key, one in self._rendezvous.items() if key.channel == channel]
            return {rank for one in open_ones for rank in self._missing_at(one)}

    def titles(self, channel: int) -> dict[int, str]:
        with self._changed:
            return dict(self._openings[channel])

    def join(self, key: CollectiveKey, rank: int, operation: Operation) -> Rendezvous:
        """Join a collective; the last rank to join executes it."""
        with self._changed:
            rendezvous = self._rendezvous.setdefault(key, Rendezvous(key))
            first_rank, first = next(iter(rendezvous.operations.items()), (rank, operation))
            rendezvous.operations[rank] = operation
            if rendezvous.mismatch is None and str(operation) != str(first):
                rendezvous.mismatch = f"rank {first_rank} {first}, rank {rank} {operation}"
                self.mismatches.setdefault(key[:2], rendezvous.mismatch)
            if len(rendezvous.operations) == len(key.ranks):
                del self._rendezvous[key]
                if rendezvous.mismatch is None:
                    execute([rendezvous.operations[r] for r in key.ranks])
                rendezvous.done_s = time.perf_counter()
            self._changed.notify_all()
            return rendezvous

    def wait(
        self, rendezvous: Rendezvous, timeout_s: float, aborted: Callable[[], object | None]
    ) -> dict[int, str | None]:
        """Wait for all ranks to join; return missing ranks with the reason why they left, if any.

        The wait ends early once `aborted()` is true.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_over(rendezvous) or bool(aborted()), timeout_s)
            return self._missing_at(rendezvous)

    def publish_step_failure(self, channel: int, step: int, text: str) -> None:
        with self._changed:
            self._step_failures[channel] = step, text
            self._changed.notify_all()

    def read_step_failure(self, channel: int, step: int) -> str | None:
        failed, text = self._step_failures.get(channel, (-1, ""))
        return text if failed == step else None

    def is_over(self, rendezvous: Rendezvous) -> bool:
        with self._changed:
            return self._is_over(rendezvous)

    def leave(self, rank: int, reason: str, channel: int | None = None) -> None:
        """Record that `rank` issues no more operations (on `channel`)."""
        with self._changed:
            self._exits.setdefault((rank, channel), reason)
            self._changed.notify_all()

    def _is_over(self, rendezvous: Rendezvous) -> bool:
        return rendezvous.mismatch is not None or self._is_settled(self._missing_at(rendezvous))

    def _missing_at(self, rendezvous: Rendezvous) -> dict[int, str | None]:
        channel, ranks, _ = rendezvous.key
        return self._missing(ranks, rendezvous.operations, channel)

    def _missing(
        self, ranks: Iterable[int], present: Collection[int], channel: int
    ) -> dict[int, str | None]:
        """Return those of `ranks` that are not `present`, with the reason why they left, if any."""
        return {
            rank: self._exits.get((rank, None)) or self._exits.get((rank, channel))
            for rank in ranks
            if rank not in present
        }

    @staticmethod
    def _is_settled(missing: dict[int, str | None]) -> bool:
        """Return True if no rank is missing, or if a missing one has left."""
        return not missing or any(missing.values())


@torch.no_grad()
def execute(operations: list[Operation]) -> None:
    """Carry out one operation of several ranks, in the order of ranks."""
    first = operations[0]
    tensors = [operation.tensor for operation in operations]
    if first.kind == "all_reduce":
        total = _sum(tensors, first.average)
        for tensor in tensors:
            tensor.copy_(total)
    elif first.kind == "broadcast":
        for tensor in tensors:
            tensor.copy_(tensors[first.src])
    elif first.kind == "all_to_all":
        sent = [o._replace(tensor=o.tensor.clone()).chunks for o in operations]
        for place, operation in enumerate(operations):
            for source, chunk in enumerate(operation.chunks):
                chunk.copy_(sent[source][place])
    else:
        chunks = [operation.chunks for operation in operations]
        for place, row in enumerate(chunks):
            if first.tree is not None:
                parts = [other[place].view(first.tree.width, -1) for other in chunks]
                counts = first.tree.summands
                rows = [r.clone() for p, n in zip(parts, counts, strict=True) for r in p[:n]]
                for number, total in enumerate(sum_along_tree_(rows, first.tree.additions)):
                    parts[place][number].copy_(total)
            elif first.kind == "reduce_scatter":
                parts = [other[place] for other in chunks]
                row[place].copy_(_sum(parts, first.average))
            else:
                for source, chunk in enumerate(row):
                    chunk.copy_(chunks[source][source])


def _sum(tensors: list[Tensor], average: bool) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total.div_(len(tensors)) if average else total
