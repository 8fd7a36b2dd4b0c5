"""The benchmark runs, compares like with like, and says what it measured; never how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from fddp import cli
from fddp.bench.contestants import (
    FDDP,
    FLAT,
    LOCAL_FUNCTION,
    LOCAL_MODULE,
    WRAPPERS,
    contestants,
)
from fddp.bench.measure import Series, measure
from fddp.bench.models import WORKLOADS
from fddp.bench.rank import check_gradients
from fddp.bench.report import Entry, ModelResult

if TYPE_CHECKING:
    from ranks import RankPool

SYNCHRONISED = {FDDP, FLAT, *WRAPPERS, *WRAPPERS.values(), "DDP static_graph"}


@pytest.mark.slow
def test_the_command_measures_and_writes(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    assert cli.main(["bench", "--quick", "--json", str(path)]) == 0
    printed = capfd.readouterr().out
    assert f"written to {path}" in printed
    written = json.loads(path.read_text())
    assert written["environment"]["ranks"] == 2
    assert written["environment"]["threads_per_rank"] == 1
    assert written["environment"]["torch"] == torch.__version__
    assert (written["rounds"], written["steps_per_round"]) == (2, 1)
    assert list(written["models"]) == list(WORKLOADS)
    for model in written["models"].values():
        assert model["title"] in printed
        assert model["best_ddp"].startswith("DDP ")
        assert set(model["step_ratio"]) == {"median", "low", "high"}
        assert isinstance(model["exposed_ratio"], float)
        assert set(model["wrapper_ratios"]) == set(WRAPPERS)
        assert {LOCAL_MODULE, LOCAL_FUNCTION, *SYNCHRONISED} <= set(model["contestants"])
        for name, contestant in model["contestants"].items():
            assert name in printed
            assert contestant["form"] == (
                "function" if name in (FDDP, LOCAL_FUNCTION) else "module"
            )
            assert len(contestant["rounds_s"]) == 2
            assert contestant["median_s"] > 0
    assert [small["nbytes"] for small in written["small"]] == [4, 65536, 1048576]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_model_is_the_same_as_module_and_as_function(name: str) -> None:
    workload = WORKLOADS[name]
    module, batch = workload.build(), workload.batch(0)
    params, loss_fn = workload.to_function(workload.build())
    loss = module(batch)
    assert torch.equal(loss, loss_fn(params, batch))
    loss.backward()
    # Zeros, or nearly, would be right whatever became of them.
    assert all(1e-6 < p.grad.norm() < 1e6 for p in module.parameters())
    assert not torch.equal(batch, workload.batch(1))


def _field(rank: int, world_size: int) -> tuple[set[str], bool, str]:
    field = contestants(WORKLOADS["small"], WORKLOADS["small"].batch(rank))
    local = field[0]
    for contestant in field:
        for _ in range(3):
            contestant.step()
    check_gradients(field)
    alike = all(
        torch.equal(a, b) for a, b in zip(local.gradients(), field[-1].gradients(), strict=True)
    )
    field[2].gradients()[7].mul_(1.001)
    try:
        check_gradients(field)
    except RuntimeError as error:
        return {c.name for c in field}, alike, str(error)
    return set(), alike, ""


def test_wrong_gradients_are_not_timed(ranks: RankPool) -> None:
    for names, alike, error in ranks.run(2, _field):
        assert {LOCAL_MODULE, LOCAL_FUNCTION, *SYNCHRONISED} <= names
        assert not alike  # ranks have different batches, or the check would see nothing
        assert error == f"{FDDP!r} gave other gradients than {FLAT!r}: not worth timing"


def _turns(rank: int, world_size: int) -> tuple[list[str], dict[str, Series]]:
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    series = measure(steps, 2, 3, lambda: calls.append("|"))
    dist.barrier()
    return calls, series


def test_contestants_take_turns(ranks: RankPool) -> None:
    (calls, series), (_, others) = ranks.run(2, _turns)
    assert "".join(calls) == "aaaabbbbcccc|bbbbccccaaaa|"
    assert list(series) == ["a", "b", "c"]
    assert series == others
    assert all(len(each.rounds_s) == 2 for each in series.values())


def test_figures() -> None:
    def entry(name: str, form: str, is_ddp: bool, *rounds_s: float) -> Entry:
        return Entry(name, form, is_ddp, Series(rounds_s))

    model = ModelResult(
        "tiny",
        1,
        1,
        (
            entry(LOCAL_MODULE, "module", False, 1.0, 1.0, 1.0),
            entry(LOCAL_FUNCTION, "function", False, 2.0, 2.0, 2.0),
            entry(FDDP, "function", False, 4.0, 3.0, 3.0),
            entry("DDP default", "module", True, 5.0, 5.0, 5.0),
            entry("DDP static_graph", "module", True, 2.0, 3.0, 6.0),
        ),
    )
    assert model.best_ddp.name == "DDP static_graph"
    assert model.versus_best(model.entry(FDDP)) == (1.0, 0.5, 2.0)
    assert model.exposed_s(model.entry(FDDP)) == 1.0
    assert model.exposed_s(model.best_ddp) == 2.0
    assert model.exposed_ratio == 0.5
