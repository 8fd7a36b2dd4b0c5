"""Training that loses ranks ends with the bits of training that did not."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import fddp
from examples import elastic, torchft
from tests.support.ranks import RankPool

STEPS, SEED = 7, 328


def whole(rank: int, world_size: int, folder: str, fraction: float | None, *stops: int) -> str:
    """Trains on, up to each of some steps."""
    hook = None if fraction is None else fddp.hooks.top_k(fraction)
    return [elastic.train(Path(folder), steps, hook=hook) for steps in stops][-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "whole").mkdir()
    return tmp_path / "whole"


def asked(kills: int) -> argparse.Namespace:
    return argparse.Namespace(ranks=2, kills=kills, steps=STEPS, seed=SEED, top_k=None)


@pytest.mark.nightly
def test_killed_ranks_cost_no_bits(
    ranks: RankPool, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is killed on the way back; then rank 0 while it writes the next checkpoint."""
    planned = elastic.kills(2, STEPS, 2, SEED)
    assert planned == [elastic.Kill(4, 1, "backward"), elastic.Kill(5, 0, "writing")]
    ranks.run(2, whole, str(folder), None, STEPS)
    disturbed = folder.parent / "disturbed"
    code = elastic.start(asked(2), disturbed, 2)
    assert elastic.show(asked(2), folder, disturbed, [0, code]) == 0
    printed = capfd.readouterr().out
    assert "exit codes [0, 0], 2 restarts: same bits" in printed
    assert printed.count("done") == 2
    assert any(len(found) > 1 for found in elastic.digests(disturbed).values()), "steps ran again"
    # The same table with one other bit, and with a run that gave up.
    log = folder / "log.jsonl"
    text = log.read_text()
    found = elastic.digests(folder)[4][0]
    log.write_text(text.replace(found, "0" * 16))
    assert elastic.show(asked(2), folder, disturbed, [0, 0]) == 1
    log.write_text(text)
    assert elastic.show(asked(2), folder, disturbed, [0, 1]) == 1


@pytest.mark.parametrize("fraction", [pytest.param(None, marks=pytest.mark.nightly), 0.25])
def test_a_run_in_two_parts_is_a_run(
    ranks: RankPool, folder: Path, tmp_path: Path, fraction: float | None
) -> None:
    """With a hook, each rank's own state is in the checkpoint."""
    (tmp_path / "parts").mkdir()
    once = ranks.run(2, whole, str(folder), fraction, STEPS)
    parts = ranks.run(2, whole, str(tmp_path / "parts"), fraction, 3, STEPS)
    assert once == parts
    assert once[0] == once[1]
    assert elastic.digests(folder) == elastic.digests(tmp_path / "parts")


def half_written(rank: int, world_size: int, folder: str) -> tuple[int, bool, list[str]]:
    path = Path(folder)
    elastic.train(path, 3)
    if rank == 0:
        (path / "step-000006.part").mkdir()
        (path / "step-000006.part" / "__0_0.distcp").write_bytes(b"half")
    dist.barrier()
    step, plan = elastic.find(path)
    assert not [*path.glob("*.part")]
    elastic.train(path, STEPS)
    return step, plan is not None, sorted(found.name for found in path.glob("step-*"))


def test_half_a_checkpoint_is_none(ranks: RankPool, folder: Path) -> None:
    for outcome in ranks.run(2, half_written, str(folder)):
        assert outcome == (3, True, ["step-000006", "step-000007"])


def test_kills() -> None:
    for seed in range(50):
        planned = elastic.kills(10, 40, 3, seed)
        assert planned == elastic.kills(10, 40, 3, seed)
        assert len({kill.step for kill in planned}) == 10
        assert all(0 <= kill.rank < 3 and kill.step < 40 for kill in planned)
        assert all(kill.rank == 0 for kill in planned if kill.place == "renaming")
    places = {kill.place for seed in range(50) for kill in elastic.kills(10, 40, 3, seed)}
    assert len(places) == 5


def test_a_missing_kill_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"begun": 0}, {"step": 0, "digest": "0" * 16}]
    for name in ("whole", "disturbed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        (tmp_path / name / "errors.txt").write_text("what torchrun said")
    assert elastic.show(asked(1), tmp_path / "whole", tmp_path / "disturbed", [0, 0]) == 1
    printed = capsys.readouterr()
    assert "NOT DONE" in printed.out
    assert "0 restarts: FAILED" in printed.out
    assert printed.err == "what torchrun said\n"


# torchft


@pytest.mark.nightly
def test_replicas_under_torchft(capfd: pytest.CaptureFixture[str]) -> None:
    """One is killed and started again; all end with the same bits."""
    pytest.importorskip("torchft", reason="torchft is not installed")
    assert torchft.main(["--steps", "10"]) == 0
    printed = capfd.readouterr().out
    assert "killed: True; all replicas end with the same bits: True" in printed
    assert "lost rank 1" in printed


def test_a_missing_torchft_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    assert torchft.main([]) == 2
    assert "pip install torchft" in capsys.readouterr().err
