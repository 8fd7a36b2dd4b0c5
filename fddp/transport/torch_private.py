"""Private names of torch: process groups and backends."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def process_groups() -> dict[Any, Any]:
    """Process groups that torch has not destroyed."""
    groups: dict[Any, Any] = distributed_c10d._world.pg_map
    return groups


def find_backend_by_lower_case(name: str, create: Any) -> None:
    """Make torch find a backend by its name in lower case, which is how torch before 2.15 looks up
    the first plugin for the default backend of a group of "cpu:fddp"."""
    plugin = dist.Backend._BackendPlugin(create, extended_api=True)
    dist.Backend._plugins = {name: plugin, **dist.Backend._plugins}
