"""torch's own tests of DistributedDataParallel, run on fddp's class.

`TORCH_SUITE_WRAPPER=torch.nn.parallel.distributed.DistributedDataParallel` runs them on torch's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ranks import RankPool
from torch_suite.catalogue import TorchTest, torch_tests, wrapper_test_names
from torch_suite.left_out import LEFT_OUT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_WRAPPER = os.environ.get("TORCH_SUITE_WRAPPER", "fddp.DistributedDataParallel")
_ALL = torch_tests()
_LEFT_OUT = {name for names in LEFT_OUT.values() for name in names}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Processes of this module alone: torch's tests leave traces.

    With another parameter come other processes.
    """
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("test", "pool"),
    [
        pytest.param(test, test.rpc_ranks, id=test.name)
        # Few ranks first, so that no more processes wait than needed.
        for test in sorted(_ALL, key=lambda test: (test.rpc_ranks, test.world_size))
        if test.name not in _LEFT_OUT
    ],
    indirect=["pool"],
)
def test_torch_suite(test: TorchTest, pool: RankPool, tmp_path: Path) -> None:
    pool.run(test.world_size, _run, test, _WRAPPER, str(tmp_path / "store"))


def _run(rank: int, world_size: int, test: TorchTest, wrapper: str, shared_file: str) -> None:
    # Not on top: importing torch's test modules changes flags of torch.
    from torch_suite import on_rank

    on_rank.run(rank, world_size, test, wrapper, shared_file)


def test_what_is_left_out_is_there() -> None:
    assert not _LEFT_OUT - {test.name for test in _ALL} - wrapper_test_names()


def test_no_test_is_missed() -> None:
    assert not wrapper_test_names() - {test.name for test in _ALL} - _LEFT_OUT
