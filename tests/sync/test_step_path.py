"""The path of one step through the library: Python calls and files, counted."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
import torch

import fddp

if TYPE_CHECKING:
    from tests.support.ranks import RankPool

PACKAGE = str(Path(fddp.__file__).parent) + "/"
WARM_UP = 6
WIDTH = 300  # of a square leaf, one for each bucket


def calls_of_a_step(rank: int, world_size: int, buckets: int) -> list[tuple[str, str]]:
    """File and function of each Python call of fddp in one step, after some others."""
    params = {f"w{i}": torch.ones(WIDTH, WIDTH) for i in range(buckets)}
    cap_mb = 4 * WIDTH * WIDTH / 2**20
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            calls.append((file.removeprefix(PACKAGE), frame.f_code.co_name))

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        return sum((w * x).sum() for w in params.values())

    with fddp.GradSync(
        params, transport="c10d", bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb
    ) as sync:
        step = sync.value_and_grad(loss)
        results = [step(params, torch.ones(())) for _ in range(WARM_UP)][-1:]
        assert len(sync.plan.buckets) == buckets
        sys.setprofile(note)
        try:
            results = [step(params, torch.ones(()))]
        finally:
            sys.setprofile(None)
        assert results
    return calls


@pytest.mark.parametrize(("buckets", "most"), [(1, 65), (8, 65 + 7 * 4)])
def test_a_step_takes_a_short_path(ranks: RankPool, buckets: int, most: int) -> None:
    """On one rank over gloo's group; docs/architecture.md shows the path."""
    (calls,) = ranks.run(1, calls_of_a_step, buckets)
    path = [call for i, call in enumerate(calls) if i == 0 or call != calls[i - 1]]
    files = {file for file, _ in calls}
    print(f"{buckets} buckets: {len(calls)} calls in {len(files)} files")
    print("\n".join(f"{file:34} {function}" for file, function in path))
    assert len(calls) <= most
    assert len(files) <= 13, sorted(files)
