"""Creation of a backend for a new process group: shared memory within a host, gloo across hosts."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from fddp.core.protocol.differences import check_equal
from fddp.errors import DesyncError, PeerError, RankLostError, error_text
from fddp.native import extension
from fddp.transport.backend.choice import (
    ALONE,
    BackendChoice,
    note_choice,
    noted_choice,
    open_in_memory,
    open_over_gloo,
)
from fddp.transport.backend.exits import leave_groups_at_exit
from fddp.transport.backend.reconfiguration import reconfigurable_backend
from fddp.transport.backend.store_exchange import StoreExchange, missing_error
from fddp.transport.c10d.group_probe import GroupProbe
from fddp.transport.c10d.rendezvous import connect_with_abort
from fddp.transport.group_backend import backend_of
from fddp.transport.liveness.bounded_store import client_of
from fddp.transport.liveness.interrupts import (
    PeerFailureError,
    ignore_backend_errors,
    is_of_this_rank,
)
from fddp.transport.liveness.membership import Membership
from fddp.transport.shm.host_discovery import discover_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fddp._C import ShmBackend

T = TypeVar("T")


def create_backend(options: Any, _: object = None) -> Any:
    """Create the backend of a new process group; a collective call of its ranks; blocks.

    Args:
        options: `DistributedBackendOptions` of torch.

    Raises:
        SyncTimeoutError: some ranks did not take part within the timeout of the group.
        DesyncError: the ranks have different names for the group.
        RankLostError: a rank has left the default group, or its process has ended.
        PeerError: another rank failed in its call. The next call of all ranks starts anew.
    """
    leave_groups_at_exit()
    if getattr(options, "enable_reconfigure", False):  # from torch 2.14 on
        return reconfigurable_backend(
            options.store,
            options.group_id,
            options.group_rank,
            options.group_size,
            _seconds(options.timeout),
        )
    if options.group_size == 1:
        return _create(options, options.store, lambda: None)
    rank, size = options.group_rank, options.group_size
    whole, store = dist.group.WORLD, options.store
    if whole is not None:
        # torch adds the name and the device to the store of the default group.
        members = tuple(options.global_ranks_in_group or range(size))
        store = dist.PrefixStore(f"fddp/groups/{members}", store.underlying_store.underlying_store)
    # Counts the calls of these ranks in the store, also those that fail on some of them.
    meeting = Membership(store, rank, size, client_of(whole) if whole else None)
    probe = None if whole is None else GroupProbe(whole)

    def check() -> None:
        if probe is not None:
            _check_present(options, probe.lost())
        if meeting.failed():
            raise PeerFailureError("another rank reported a failure")

    def stopped() -> None:
        # Not skipped: torch counts the groups of a rank in their names.
        raise PeerFailureError("the other ranks have given up before")

    try:
        absent = meeting.open(_seconds(options.timeout), check, on_stopped=stopped)
        if absent:
            raise missing_error(rank, size, absent, _seconds(options.timeout))
        made = _create(options, meeting.store.raw, check)
        meeting.forget(())
        return made
    except PeerFailureError as error:
        failed = meeting.errors(tuple(range(size)))
        texts = [f"rank {other} failed: {text}" for other, text in failed.items()]
        raise PeerError(
            f"creating a process group on rank {rank} of {size}: {'; '.join(texts) or error}; call "
            "again on all ranks",
            failed,
        ) from error
    except BaseException as error:
        if is_of_this_rank(error):
            with ignore_backend_errors():
                meeting.withdraw(error_text(error))
        raise
    finally:
        if whole is None:
            meeting.store.end()


def _create(options: Any, store: dist.Store, check: Callable[[], None]) -> Any:
    """Create the backend among ranks that are present, in a part of the store for this call.
    `check` raises if a rank is lost meanwhile."""
    rank, size, timeout_s = options.group_rank, options.group_size, _seconds(options.timeout)
    if size > 1:
        _check_names(options, store, check)
    whole = _default_backend()
    backend: ShmBackend | dist.ProcessGroupGloo
    if size == 1:
        backend, choice = extension.compiled.ShmBackend.alone(timeout_s), ALONE
    elif whole is not None and options.global_ranks_in_group:
        # The ranks have mapped each other's memory already.
        ranks = options.global_ranks_in_group
        split = lambda store: whole.split(store, ranks, timeout_s)  # noqa: E731
        backend = _connect(options, store, check, split)
        choice = BackendChoice("shm", "all ranks of the default group share the memory of a host")
    else:

        def discover(store: dist.Store) -> tuple[ShmBackend | None, BackendChoice]:
            exchange = StoreExchange(store, rank, size, timeout_s)
            opened = open_in_memory(exchange, discover_hosts(exchange), timeout_s)
            exchange.close()
            return opened

        opened, choice = _connect(options, store, check, discover)
        if opened is None:
            ranks = options.global_ranks_in_group or range(size)
            backend = open_over_gloo(store, rank, ranks, options.group_id, timeout_s)
        else:
            backend = opened
    note_choice(options.group_id, rank, size, choice)
    return backend


def _check_names(options: Any, store: dist.Store, check: Callable[[], None]) -> None:
    """Compare the name of a group beside the default one, for which torch counts a rank's groups.

    It is a part of the keys of torch: ranks with different names would wait for each other.
    """
    members = tuple(options.global_ranks_in_group or range(options.group_size))
    if dist.group.WORLD is None:
        return
    timeout_s = _seconds(options.timeout)

    def exchange_names(store: dist.Store) -> list[str]:
        exchange = StoreExchange(store, options.group_rank, options.group_size, timeout_s)
        names = [name.decode() for name in exchange.exchange(options.group_id.encode())]
        exchange.close()
        return names

    names = _connect(options, dist.PrefixStore("names", store), check, exchange_names)
    check_equal(
        f"the name of the process group of ranks {', '.join(map(str, members))}",
        names,
        "these ranks have made different numbers of groups before; make the same groups on all of "
        "them, with and without use_local_synchronization",
        DesyncError,
        members,
    )


def backend_choice(group: dist.ProcessGroup | None = None) -> BackendChoice:
    """Return the way in which the ranks of a group with the backend "fddp" communicate.

    Args:
        group: None for the default group.

    Raises:
        ValueError: the group has another backend, or is not open yet.
    """
    resolved = dist.group.WORLD if group is None else group
    if resolved is None or "fddp" not in dist.get_backend_config(resolved):
        raise ValueError(f'the group {resolved!r} does not have the backend "fddp"')
    noted = noted_choice(resolved.group_name)
    if noted is not None:
        return noted
    # torch splits groups without a call of `create_backend`.
    backend = backend_of(resolved, torch.device("cpu"))
    if isinstance(backend, extension.compiled.ReconfigurableBackend):
        raise ValueError(f"the group {resolved!r} is not open: call _reconfigure first")
    if isinstance(backend, dist.ProcessGroupGloo):
        return BackendChoice("gloo", "it was split from a group over gloo")
    return BackendChoice("shm", "it was split from a group with shared memory")


def _default_backend() -> ShmBackend | None:
    """Backend of the default group for the CPU, if it is one in shared memory of several ranks."""
    group = dist.group.WORLD
    cpu = torch.device("cpu")
    if group is None or group.size() == 1 or cpu not in group._device_types:
        return None
    backend = backend_of(group, cpu)
    return backend if isinstance(backend, extension.compiled.ShmBackend) else None


def _connect(
    options: Any,
    store: dist.Store,
    check: Callable[[], None],
    connect: Callable[[dist.Store], T],
) -> T:
    """Return the result of `connect`, called with a `store`; `check` is called meanwhile."""
    made: T = connect_with_abort(connect, store, _seconds(options.timeout), check)[0]
    return made


def _check_present(options: Any, gone: Sequence[int]) -> None:
    """Raise RankLostError if some ranks of the group are `gone` from the default group."""
    rank, size = options.group_rank, options.group_size
    members = [*(options.global_ranks_in_group or range(size))]
    lost = tuple(members.index(other) for other in gone if other in members)
    if lost:
        names = ", ".join(f"rank {place} (global {members[place]})" for place in lost)
        raise RankLostError(
            f"creating a process group on rank {rank} of {size}: lost {names} (it left the "
            "default group, or its process has ended); create a group of the remaining ranks",
            lost,
        )


def _seconds(timeout: timedelta | float) -> float:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
