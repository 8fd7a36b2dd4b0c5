"""torch's flight recorder, from the version on that records works of any backend."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from tests.support.backends import new_fddp_group
from tests.support.ranks import RankPool


def _recorded(rank: int, world_size: int) -> list[tuple[str, list[Any]]]:
    group = new_fddp_group()
    dist.all_reduce(torch.ones(4), group=group)
    dist.barrier(group)
    dump = json.loads(c10d._dump_fr_trace_json(backend="fddp"))
    names = [(entry["profiling_name"], entry["input_sizes"]) for entry in dump["entries"]]
    dist.destroy_process_group(group)
    return names[-2:]


@pytest.mark.skipif(
    not hasattr(c10d, "FlightRecorderHook"), reason="this torch records its own backends only"
)
def test_works_are_recorded(ranks: RankPool) -> None:
    for names in ranks.run(2, _recorded):
        assert names == [("fddp:all_reduce", [[4]]), ("fddp:barrier", [])]
