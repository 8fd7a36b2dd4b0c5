"""torch's base class, models and checks for sharded parameters, over the backend "fddp"."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import RankPool

_NAMES = [
    *("test_parity", "test_mixed_precision", "test_accumulated_gradients", "test_clipped_norm"),
    *("test_unused_parameters", "test_hybrid_shards"),
]


def _run(rank: int, world_size: int, name: str, folder: str) -> None:
    from tests.transport.backend.torch_suite import fsdp_cases

    fsdp_cases.run(rank, world_size, name, "fddp", folder)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 2) for name in _NAMES),
        *(pytest.param(name, 4, marks=pytest.mark.nightly) for name in _NAMES[:-1]),
        (_NAMES[-1], 4),  # on two ranks, its mesh has one row
    ],
)
def test_torch_fsdp(name: str, world_size: int, own_ranks: RankPool, tmp_path: Path) -> None:
    own_ranks.run(world_size, _run, name, str(tmp_path))
