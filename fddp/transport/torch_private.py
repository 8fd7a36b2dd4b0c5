"""Private names of torch: process groups and backends."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


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


def gloo_options() -> Any:
    """Return options of a gloo backend, which torch exports under this name."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo._Options()


def find_backend_by_lower_case(name: str, create: Any) -> None:
    """Make torch find a backend by its name in lower case, which is how torch before 2.15 looks up
    the first plugin for the default backend of a group of "cpu:fddp"."""
    plugin = dist.Backend._BackendPlugin(create, extended_api=True)
    dist.Backend._plugins = {name: plugin, **dist.Backend._plugins}
