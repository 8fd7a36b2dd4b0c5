"""Creation of a backend for a new process group: shared memory within hosts, gloo between them."""

from __future__ import annotations

import logging
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fddp.native import extension
from fddp.transport.backend.choice import BackendChoice, choose_backend
from fddp.transport.backend.exits import leave_groups_at_exit
from fddp.transport.backend.store_exchange import StoreExchange
from fddp.transport.shm.host_discovery import discover_hosts
from fddp.transport.shm.opening import open_shm_groups

if TYPE_CHECKING:
    from fddp.transport.shm.bindings import ShmGroup

_log = logging.getLogger("fddp")


_choices: dict[str, BackendChoice] = {}
"""By name of the process group."""


def create_backend(options: Any, _: object = None) -> Any:
    """Create the backend of a new process group; a collective call of its ranks; blocks.

    Args:
        options: `DistributedBackendOptions` of torch.

    Raises:
        SyncTimeoutError: some ranks did not take part within the timeout of the group.
    """
    leave_groups_at_exit()
    rank, size, timeout_s = options.group_rank, options.group_size, _seconds(options.timeout)
    whole = _default_backend()
    if size == 1:
        backend = extension.load().ShmBackend(None, rank, size, timeout_s)
        choice = BackendChoice("shm", "the group has only one rank")
    elif whole is not None and options.global_ranks_in_group:
        # The ranks have mapped each other's memory already.
        backend = whole.split(options.store, options.global_ranks_in_group, timeout_s)
        choice = BackendChoice("shm", "all ranks of the default group share the memory of a host")
    else:
        exchange = StoreExchange(options.store, rank, size, timeout_s)
        opened, choice = _open_group(exchange)
        backend = _connected(opened, exchange, options)
        exchange.close()
    _choices[options.group_id] = choice
    _log.info("rank %d of %d: backend %s, because %s", rank, size, choice.name, choice.reason)
    return backend


def backend_choice(group: dist.ProcessGroup | None = None) -> BackendChoice:
    """Return the way in which the ranks of a group with the backend "fddp" communicate.

    Args:
        group: None for the default group.

    Raises:
        ValueError: the group has another backend.
    """
    resolved = dist.group.WORLD if group is None else group
    if resolved is None or "fddp" not in dist.get_backend_config(resolved):
        raise ValueError(f'the group {resolved!r} does not have the backend "fddp"')
    if resolved.group_name in _choices:
        return _choices[resolved.group_name]
    # torch splits groups without a call of `create_backend`.
    if isinstance(_backend_of(resolved), dist.ProcessGroupGloo):
        return BackendChoice("gloo", "it was split from a group on several hosts")
    return BackendChoice("shm", "it was split from a group with shared memory")


def _default_backend() -> Any | None:
    """Backend of the default group for the CPU, if it is one in shared memory of several ranks."""
    group = dist.group.WORLD
    if group is None or group.size() == 1 or torch.device("cpu") not in group._device_types:
        return None
    backend = _backend_of(group)
    return backend if isinstance(backend, extension.load().ShmBackend) else None


def _backend_of(group: dist.ProcessGroup) -> Any:
    backend = group._get_backend(torch.device("cpu"))
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps each backend.
    return getattr(backend, "wrapped_pg", backend)


class _OpenedGroup(NamedTuple):
    """Shared memory of the ranks of this rank's host."""

    group: ShmGroup
    ranks: tuple[int, ...]


def _open_group(exchange: StoreExchange) -> tuple[_OpenedGroup | None, BackendChoice]:
    host_groups = discover_hosts(exchange)
    try:
        hosts = host_groups.hosts
        choice = choose_backend(hosts, host_groups.describe(host_groups.problems))
        if choice.name == "gloo":
            return None, choice
        own = next(host for host in hosts if exchange.rank in host)
        opened = open_shm_groups(exchange, host_groups, [own], exchange.timeout_s)
        if set(opened.everywhere) == set(hosts):
            return _OpenedGroup(opened.own[own], own), choice
        for group in opened.own.values():
            group.leave()
        problems = {**host_groups.problems, **opened.problems}
        return None, BackendChoice("gloo", host_groups.describe(problems))
    finally:
        host_groups.close()


def _connected(opened: _OpenedGroup | None, exchange: StoreExchange, options: Any) -> Any:
    """Backend over the memory of this rank's host, and over connections to others if there are."""
    rank, size, timeout_s = exchange.rank, exchange.world_size, exchange.timeout_s
    if opened is None:
        return _gloo_of_all(options, timeout_s)
    native, locals_ = extension.load(), len(opened.ranks)
    host, local = divmod(rank, locals_)
    within = native.ShmBackend(opened.group, local, locals_, timeout_s, opened.ranks[0])
    if locals_ == size:
        return within
    # Reports of a failure must not be those of an earlier group with the same part of the store.
    token = exchange.exchange(secrets.token_hex(8).encode())[0].decode()
    reports = dist.PrefixStore(f"fddp/reports/{token}", options.store)
    across = _gloo(options.store, f"gloo/{local}", host, size // locals_, timeout_s)
    whole = _gloo_of_all(options, timeout_s)
    return native.HostsBackend(opened.group, within, across, whole, reports, timeout_s)


def _gloo_of_all(options: Any, timeout_s: float) -> dist.ProcessGroupGloo:
    rank, size = options.group_rank, options.group_size
    backend = _gloo(options.store, "gloo", rank, size, timeout_s)
    # As torch does. Gloo reads the ranks when it is split; none stand for all.
    ranks = list(options.global_ranks_in_group) or list(range(size))
    backend.options.global_ranks_in_group = ranks
    backend.options.group_name = options.group_id
    return backend


def _gloo(
    store: dist.Store, prefix: str, rank: int, size: int, timeout_s: float
) -> dist.ProcessGroupGloo:
    limit = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, size, limit)


def _seconds(timeout: timedelta | float) -> float:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
