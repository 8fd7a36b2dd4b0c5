"""torch's own tests of process groups, over the backend "fddp": a sample, or all of them with
`TORCH_TESTS=all`. `TORCH_TESTS_BACKEND=gloo` runs them over gloo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.ranks import RankPool
from tests.transport.backend.torch_suite.catalogue import torch_tests
from tests.transport.backend.torch_suite.left_out import LEFT_OUT

_BACKEND = os.environ.get("TORCH_TESTS_BACKEND", "fddp")
_ALL = torch_tests()
_LEFT_OUT = {name for names in LEFT_OUT.values() for name in names}
_RUN = [name for name in _ALL if name not in _LEFT_OUT]
_RANKS = 4  # more than the groups of some ranks have, and even
_SAMPLE = [
    *("test_all_gather_object_default_pg", "test_all_reduce_coalesced_max", "test_all_to_all"),
    *("test_barrier_full_group", "test_batch_isend_irecv_gloo_tags", "test_gather_object"),
    *("test_reduce_group_product", "test_send_recv_any_source", "test_sparse_all_reduce_sum"),
]


def _run(rank: int, world_size: int, name: str, backend: str, folder: str) -> str:
    # Not on top: importing torch's test modules changes flags of torch.
    from tests.transport.backend.torch_suite import on_rank

    return on_rank.run(rank, world_size, name, backend, folder)


@pytest.mark.parametrize("name", _RUN if os.environ.get("TORCH_TESTS") == "all" else _SAMPLE)
def test_torch_suite(name: str, own_ranks: RankPool, tmp_path: Path) -> None:
    outcomes = own_ranks.run(_RANKS, _run, name, _BACKEND, str(tmp_path))
    skips = [outcome for outcome in outcomes if outcome != "passed"]
    if skips:
        pytest.skip(skips[0])


def test_left_out_tests_exist() -> None:
    assert not _LEFT_OUT - {*_ALL}
    assert {*_SAMPLE} <= {*_RUN}
