"""torch's own tests of DistributedDataParallel, run on fddp's class.

`TORCH_SUITE_WRAPPER=torch.nn.parallel.distributed.DistributedDataParallel` runs them on torch's.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from tests.ddp.torch_suite.catalogue import TorchTest, torch_tests, wrapper_test_names
from tests.ddp.torch_suite.left_out import LEFT_OUT
from tests.support.ranks import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_WRAPPER = os.environ.get("TORCH_SUITE_WRAPPER", "fddp.DistributedDataParallel")
_ALL = torch_tests()
_LEFT_OUT = {name for names in LEFT_OUT.values() for name in names}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, RankPool]]:
    """Processes of this module alone, because torch's tests leave traces; by `TorchTest.pool`."""
    pools: dict[str, RankPool] = defaultdict(RankPool)
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize(
    "test",
    # Those of one pool together; few ranks first, so that no more processes wait than needed.
    sorted(
        (test for test in _ALL if test.name not in _LEFT_OUT),
        key=lambda test: (test.pool, test.world_size),
    ),
    ids=lambda test: test.name,
)
def test_torch_suite(test: TorchTest, pools: dict[str, RankPool], tmp_path: Path) -> None:
    for name, pool in pools.items():
        if name != test.pool:
            pool.close()
    pools[test.pool].run(test.world_size, _run, test, _WRAPPER, str(tmp_path / "store"))


def _run(rank: int, world_size: int, test: TorchTest, wrapper: str, shared_file: str) -> None:
    # Not on top: importing torch's test modules changes flags of torch.
    from tests.ddp.torch_suite import on_rank

    on_rank.run(rank, world_size, test, wrapper, shared_file)


def test_left_out_tests_exist() -> None:
    assert not _LEFT_OUT - {test.name for test in _ALL} - wrapper_test_names()


def test_no_test_is_missed() -> None:
    assert not wrapper_test_names() - {test.name for test in _ALL} - _LEFT_OUT
