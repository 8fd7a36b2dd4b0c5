"""Private names of torch: process groups and backends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fddp.errors import FddpError


def process_groups() -> dict[Any, Any]:
    """Process groups that torch has not destroyed."""
    groups: dict[Any, Any] = distributed_c10d._world.pg_map
    return groups


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store of a group, which one of a class written in Python does not know itself."""
    own: dist.Store | None = group.get_group_store()
    return process_groups()[group][1] if own is None else own


def name_of(group: dist.ProcessGroup) -> str:
    """Return the name that torch gave a group, which one of such a class does not know either."""
    return str(distributed_c10d._world.pg_names[group])


def is_foreign(group: dist.ProcessGroup) -> bool:
    """Return True for a group of a class written in Python that torch did not create."""
    return type(group) is not dist.ProcessGroup and group not in process_groups()


def new_named_group(
    like: dist.ProcessGroup, ranks: Sequence[int], name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Create a group of some ranks of the job, a collective call of these alone.

    `new_group` derives its name, under which ranks meet in the store, from the number of groups
    that a rank has made, which differs between ranks after a failure. The new group has a
    connection of its own to the store: gloo occupies it while it waits for a key. It is not split
    from the default group, as on NCCL if that is bound to a device: lost ranks would have to take
    part.

    Args:
        like: group whose backends the new one has.
        ranks: ranks in the default group, in ascending order.
        name: name of the group, the same on all of them, and not used before.
        timeout: time limit of its operations.
    """
    whole, make = dist.group.WORLD, cast("Any", distributed_c10d._new_process_group_helper)
    config = dist.get_backend_config(like)
    bound: Any = whole
    device = bound.bound_device_id
    if device is not None:
        bound.bound_device_id = None
    try:
        group, _ = make(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            dist.Backend(config),
            process_groups()[whole][1].clone(),
            name,
            timeout=timeout,
            group_desc=name,
        )
    finally:
        if device is not None:
            bound.bound_device_id = device
    made: dist.ProcessGroup = group
    if {entry.partition(":")[2] for entry in config.split(",")} == {"gloo"}:
        # torch forgets it where another backend is registered, and warns when it is destroyed.
        made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    distributed_c10d._world.pg_group_ranks[made] = {rank: own for own, rank in enumerate(ranks)}
    return made


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group of this process, which is no collective call.

    torch looks up the group by the name that the group itself knows, and raises after it has
    destroyed one of a class written in Python, which knows none.
    """
    names = distributed_c10d._world.pg_names
    name = names.get(group)
    try:
        dist.destroy_process_group(group)
    except RuntimeError:
        if name is None or group in process_groups():
            raise
        distributed_c10d._unregister_process_group(name)


def gloo_options() -> Any:
    """Return options of a gloo backend, which torch exports under this name."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo._Options()


def find_backend_by_lower_case(name: str, create: Any) -> None:
    """Make torch find a backend by its name in lower case, which is how torch before 2.15 looks up
    the first plugin for the default backend of a group of "cpu:fddp"."""
    plugin = dist.Backend._BackendPlugin(create, extended_api=True)
    dist.Backend._plugins = {name: plugin, **dist.Backend._plugins}


class _World(distributed_c10d._World):
    """Process groups apart from those that torch knows, which are variables of its module."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    group_count: Any = 0
    tags_to_pg: Any = None
    pg_to_tag: Any = None

    def __init__(self, earlier: Any) -> None:
        super().__init__()
        # Calls on earlier groups are looked up here before the groups refuse them.
        self.pg_map, self.pg_group_ranks = dict(earlier.pg_map), dict(earlier.pg_group_ranks)
        self.pg_names, self.pg_backend_config = {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}


@contextmanager
def separate_world(
    backend: str, create: Callable[..., dist.ProcessGroup], refused: Collection[str]
) -> Iterator[None]:
    """Let torch know no process groups within the block but those that it makes there, and restore
    all that `init_process_group` and `destroy_process_group` change.

    Args:
        backend: name of the backend of new groups.
        create: makes them, as a function for `register_backend`.
        refused: methods that earlier groups have no more within the block.
    """
    devices = [*dist.Backend.default_device_backend_map]
    world, init_method = distributed_c10d._world, distributed_c10d._default_pg_init_method
    plugins, excepthook = dist.Backend._plugins, sys.excepthook
    if backend not in dist.Backend.backend_list:
        dist.Backend.register_backend(backend, create, extended_api=True, devices=devices)
    plugin = dist.Backend._BackendPlugin(create, extended_api=True)
    dist.Backend._plugins = {**plugins, backend.upper(): plugin}
    distributed_c10d._world = _World(world)
    distributed_c10d._unregister_all_process_groups()
    methods = {name: vars(dist.ProcessGroup)[name] for name in refused if world.pg_map}
    for name in methods:
        setattr(dist.ProcessGroup, name, _refuse)
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(dist.ProcessGroup, name, method)
        distributed_c10d._world = world
        distributed_c10d._default_pg_init_method = init_method
        distributed_c10d._update_default_pg(world.default_pg)
        for group, title in world.pg_names.items():
            distributed_c10d._register_process_group(title, group)
        dist.Backend._plugins, sys.excepthook = plugins, excepthook


def _refuse(group: dist.ProcessGroup, *_: Any, **__: Any) -> None:
    raise FddpError(
        f"a collective on {group!r}, which was made before the check and is not simulated: leave "
        f"group= out, or make groups within the step by torch.distributed.new_group"
    )
