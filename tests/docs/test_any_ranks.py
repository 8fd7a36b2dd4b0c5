"""Training that goes on with other numbers of ranks has the bits of training on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import any_ranks
from tests.support.ranks import RankPool

STEPS = (10, 20)


def trained(rank: int, world_size: int, folder: str, steps: int) -> str:
    return any_ranks.train(Path(folder), steps)


@pytest.mark.nightly
def test_other_numbers_of_ranks_cost_no_bits(ranks: RankPool, tmp_path: Path) -> None:
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    whole.mkdir()
    changed.mkdir()
    (end,) = ranks.run(1, trained, str(whole), STEPS[-1])
    for size, steps in zip((3, 4), STEPS, strict=True):
        found = ranks.run(size, trained, str(changed), steps)
        assert len({*found}) == 1
    assert found[0] == end
    assert any_ranks.digests(whole) == any_ranks.digests(changed)
    assert {step: len(seen) for step, seen in any_ranks.digests(whole).items()} == dict.fromkeys(
        STEPS, 1
    )
    assert len(set.union(*any_ranks.digests(whole).values())) == len(STEPS)


def test_starts() -> None:
    for seed in range(20):
        planned = any_ranks.starts(200, seed)
        assert planned == any_ranks.starts(200, seed)
        assert tuple(start.ranks for start in planned) == any_ranks.SIZES
        steps = [start.kill.step for start in planned if start.kill is not None]
        assert steps == sorted({*steps})
        assert planned[-1].kill is None


def test_other_bits_and_missing_kills_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = any_ranks.starts(20, seed=0, sizes=(2, 1))
    one, two = {"step": 10, "digest": "a" * 32}, {"step": 20, "digest": "b" * 32}
    other = {"step": 20, "digest": "c" * 32}
    begun = [{"begun": 0, "ranks": 2}, {"begun": 10, "ranks": 1}]
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    for folder in (whole, changed):
        folder.mkdir()
        (folder / "errors.txt").write_text("what torchrun said")

    def shown(lines: list[dict[str, object]], codes: list[int]) -> int:
        (whole / "log.jsonl").write_text("\n".join(map(json.dumps, [one, two])))
        (changed / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return any_ranks.show(planned, whole, changed, codes)

    assert shown([begun[0], one, begun[1], two], [0, 1, 0]) == 0
    assert "exit codes [0, 1, 0]: same bits" in capsys.readouterr().out
    assert shown([begun[0], one, begun[1], other], [0, 1, 0]) == 1
    assert shown([begun[0], one, begun[1], two, other], [0, 1, 0]) == 1
    assert shown([begun[0], one, begun[1], two], [0, 0, 0]) == 1
    assert shown([begun[0], one, two], [0, 1, 0]) == 1
    assert "what torchrun said" in capsys.readouterr().err
