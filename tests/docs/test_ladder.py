"""The scripts of examples/ladder compute one mean, with the collectives that the page states."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from fddp.core.plan.defaults import MIB
from tests.support.pages import ROOT, read
from tests.support.programs import torchrun

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.ranks import RankPool

MOST_LINES = {"1_naive": 60, "2_buckets": 150, "3_fddp": 60}
COLLECTIVES = {"1_naive": 16, "2_buckets": 4, "3_fddp": 5}  # of eight layers, in each step


def script(name: str) -> Any:
    return importlib.import_module(f"examples.ladder.{name}")


def two_steps(rank: int, world_size: int, name: str) -> tuple[list[Tensor], list[int]]:
    """Gradients after each of two steps, and the collectives of each."""
    module = script(name)
    model = module.make_model()
    issued: list[Any] = []
    all_reduce = dist.all_reduce
    helper: list[Any] = []
    if name == "2_buckets":
        helper = [module.Buckets(model)]
    elif name == "3_fddp":
        helper = [fddp.GradSync(model, bucket_cap_mb=module.CAP_MB)]

    def noted(*args: Any, **options: Any) -> Any:
        issued.append("all_reduce")
        return all_reduce(*args, **options)

    gradients, counts = [], []
    with mock.patch.object(dist, "all_reduce", noted):
        for step in range(2):
            module.mean_gradients_(model, *helper, module.make_batch(10 * step + rank))
            if name == "3_fddp":
                (log,) = fddp.flight(helper[0]).logs
                issued = [op.kind for op in log.ops if op.step == step]
            counts.append(len(issued))
            issued.clear()
            gradients.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    return gradients, counts


def alone(step: int) -> Tensor:
    """The mean of both ranks' gradients, in one process."""
    module = script("1_naive")
    model, total = module.make_model(), 0.0
    for rank in range(2):
        model.zero_grad()
        model(module.make_batch(10 * step + rank)).square().mean().backward()
        total = total + torch.cat([param.grad.flatten() for param in model.parameters()])
    return total / 2


def test_all_three_have_the_same_mean(ranks: RankPool) -> None:
    wanted = [alone(step) for step in range(2)]
    for name, expected in COLLECTIVES.items():
        for gradients, counts in ranks.run(2, two_steps, name):
            assert counts == [expected] * 2, name
            torch.testing.assert_close(gradients, wanted)
            assert float(gradients[0].norm()) > 0.0


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_script_is_short_and_stands_alone(name: str) -> None:
    source = read(f"examples/ladder/{name}.py")
    assert len(source.splitlines()) <= MOST_LINES[name]
    assert ("fddp" in re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)) == (
        name == "3_fddp"
    )


def test_the_scripts_share_model_data_and_cap() -> None:
    parts = [
        re.findall(r"^def make_\w+.*?\n\n\n", read(f"examples/ladder/{name}.py"), re.DOTALL | re.M)
        for name in MOST_LINES
    ]
    assert len(parts[0]) == 2
    assert parts[0] == parts[1] == parts[2]
    buckets = script("2_buckets")
    assert script("3_fddp").CAP_MB * MIB == buckets.CAP_BYTES
    model = buckets.make_model()
    names = {id(param): name for name, param in model.named_parameters()}
    buckets_of_2 = buckets.plan([*model.parameters()])
    planned = [[names[id(param)] for param in bucket] for bucket in buckets_of_2]
    cap_mb = script("3_fddp").CAP_MB
    plan = fddp.plan_buckets(model, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb)
    assert planned == [[plan.paths[leaf] for leaf in bucket.leaves] for bucket in plan.buckets]


def test_a_bucket_without_all_gradients_is_an_error() -> None:
    module = script("2_buckets")
    model = module.make_model(4)
    buckets = module.Buckets(model)
    with pytest.raises(RuntimeError, match="bucket 0 has a parameter without a gradient"):
        buckets.finish()


@pytest.mark.nightly
def test_the_page_shows_the_simulated_steps(tmp_path: Path) -> None:
    """The picture is that of the script, and the page has its figures."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "ladder.svg"
    subprocess.run([sys.executable, ROOT / "docs/images/ladder.py", out], check=True)
    drawn, kept = (
        re.findall(r">([^<>]+)</text>", text)
        for text in (out.read_text("utf-8"), read("docs/images/ladder.svg"))
    )
    assert drawn == kept
    titles = [text for text in kept if "after backward" in text and ":" in text]
    page = read("docs/guide/ladder.md")
    for title, count in zip(titles, COLLECTIVES.values(), strict=True):
        name, after_ms = re.findall(r"^(\w+)\.py.* of which ([\d.]+) ms", title)[0]
        assert f"| `{name}.py` | {count} | {after_ms} ms |" in page


@pytest.mark.nightly
@pytest.mark.parametrize("name", MOST_LINES)
def test_a_script_runs_under_torchrun(name: str) -> None:
    done = torchrun(f"examples/ladder/{name}.py", cwd=ROOT)
    norms = re.findall(r"norm of the parameters ([\d.]+)", done.stdout)
    assert len(norms) == 2
    assert norms[0] == norms[1]
