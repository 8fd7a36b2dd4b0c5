"""Transports: one interface (`base`), with implementations in `c10d`, `shm` and `loopback`."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from fddp.errors import FddpError
from fddp.transport.base import Transport as Transport
from fddp.transport.base import Work as Work
from fddp.transport.c10d.transport import C10dTransport
from fddp.transport.loopback import DEFAULT_GROUP, LoopbackTransport, group_of_one
from fddp.transport.loopback import LoopbackGroup as LoopbackGroup
from fddp.transport.loopback import loopback as loopback
from fddp.transport.mirror_c10d import MirroredProcessGroup
from fddp.transport.selection import choose
from fddp.transport.torch_private import is_foreign

#: accepted groups; None stands for the default group of `torch.distributed`
Group: TypeAlias = dist.ProcessGroup | DeviceMesh | LoopbackGroup

TransportName: TypeAlias = Literal["auto", "shm", "c10d", "loopback"]


def open_transport(
    group: Group | None = None,
    name: TransportName = "auto",
    timeout_s: float | None = None,
    title: str = "transport",
    *,
    shares: bool = False,
) -> Transport:
    """Open a communicator over `group`; every rank of the group must call this.

    Args:
        group: None for the default group of `torch.distributed`, one of its groups, a
            one-dimensional `DeviceMesh`, or the `LoopbackGroup` of `fddp.loopback`.
        name: "auto" chooses by the group: shared memory ("shm") if all ranks share a host and have
            a backend for the CPU, else "c10d", where groups along axes
            (`Transport.open_subgroups`) whose ranks share a host still use shared memory.
            "loopback" is only for groups of `fddp.loopback`.
        timeout_s: time limit of the opening and of each operation, in seconds. None for the
            group's own.
        title: name in error texts, to which the number of the transport in the group is added.
        shares: True for transports that end with a call: on NCCL they share a communicator, which
            stays for the next call.

    Raises:
        ValueError: `name` does not fit `group`, or this process is not a member of it; on every
            rank, if "shm" was requested and is not available.
        PlanMismatchError: ranks passed different names; on every rank.
        DesyncError: ranks passed different titles; on every rank.
        FddpError: there is no default group.
        SyncTimeoutError: some ranks did not open the transport within `timeout_s`; the text names
            them.

    >>> def average(group, value):
    ...     with open_transport(group) as transport:
    ...         total = torch.tensor([value * (1.0 + transport.rank)])
    ...         transport.all_reduce(total).wait("the sum")
    ...         return total.item() / transport.world_size
    >>> import torch
    >>> loopback(3, average, 10.0)
    [20.0, 20.0, 20.0]
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s} must be above 0")
    resolved = resolve(group)
    fitting = ("loopback",) if isinstance(resolved, LoopbackGroup) else ("c10d", "shm")
    if name not in ("auto", *fitting):
        raise ValueError(
            f"transport={name!r} cannot run on a {type(resolved).__name__}; "
            f'pass "auto" or {" or ".join(map(repr, fitting))}, or another group'
        )
    if isinstance(resolved, LoopbackGroup):
        return LoopbackTransport(resolved, timeout_s, title)
    opened = C10dTransport(
        resolved, timeout_s, title, shares=shares, may_share_memory=name != "c10d"
    )
    return choose(opened, name, title)


def default_group() -> dist.ProcessGroup | LoopbackGroup | None:
    """Return the group that None stands for; None if there is none."""
    own = DEFAULT_GROUP.get()
    return dist.group.WORLD if own is None else own


def resolve(group: Group | None) -> dist.ProcessGroup | LoopbackGroup:
    """Resolve the `group` argument to a group of which this rank is a member.

    Raises:
        FddpError: there is no default group.
        TypeError: `group` is not a group.
        ValueError: a `DeviceMesh` of several dimensions, or this process is not a member.
    """
    group = default_group() if group is None else group
    if isinstance(group, LoopbackGroup):
        return group
    if isinstance(group, dist.ProcessGroup) and is_foreign(group):
        return _alone_in(group)
    passed: object = group
    is_group = isinstance(passed, dist.ProcessGroup | DeviceMesh | None)
    if not is_group and passed != dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            f"group must be a process group, a DeviceMesh of one dimension or the group of "
            f"fddp.loopback, got a {type(group).__name__}"
        )
    if not dist.is_initialized():
        raise FddpError(
            "no process group: start the program with torchrun and call "
            "torch.distributed.init_process_group first, or run the ranks as threads of one "
            "process with fddp.loopback"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"the DeviceMesh has {group.ndim} dimensions {group.mesh_dim_names}; "
                "pass one dimension of it (mesh[name]), or all of it as mesh="
            )
        if group.get_coordinate() is None:
            raise ValueError(
                f"rank {dist.get_rank()} is no member of the {group}; open a transport only on "
                "the ranks that belong to it"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is no member of the group {group!r}; open a transport only on "
            "the ranks that belong to it"
        )
    return group.loopback if isinstance(group, MirroredProcessGroup) else group


def _alone_in(group: dist.ProcessGroup) -> LoopbackGroup:
    """The group of this rank alone, for a group of a class of the user's that torch does not know.

    Of several ranks such a group has no store, through which communicators connect.
    """
    if group.size() == 1:
        return group_of_one(group, distributed_c10d.default_pg_timeout.total_seconds())
    raise ValueError(
        f"{group!r} of {group.size()} ranks is not registered with torch.distributed; register its "
        f"class with torch.distributed.Backend.register_backend, and create the group with "
        f"init_process_group or new_group"
    )
