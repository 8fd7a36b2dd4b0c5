"""`python -m fddp check`: both checks of a training step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import commands as cli
from tests.support.commands import refused

TRAIN = """
import torch

import fddp


def loss(params, x):
    return (x @ params["w"]).square().mean()


def weighted(params, x):
    with fddp.GradSync(params) as sync:
        _, grads = sync.value_and_grad(loss, weight_fn=lambda params, x: len(x))(params, x)
    return fddp.tree_map(lambda p, g: p - 0.1 * g, params, grads)


def unweighted(params, x):
    grads = fddp.pmean(torch.func.grad(loss)(params, x))
    return fddp.tree_map(lambda p, g: p - 0.1 * g, params, grads)


def local(params, x):
    grads = torch.func.grad(loss)(params, x)
    return fddp.tree_map(lambda p, g: p - 0.1 * g, params, grads)


def conditional(params, x):
    grads = torch.func.grad(loss)(params, x)
    if x.sum() > 16:
        grads = fddp.pmean(grads)
    return fddp.tree_map(lambda p, g: p - 0.1 * g, params, grads)


def fails(params, x):
    raise ValueError("no luck")


def check_inputs():
    return ({"w": torch.ones(3)},), (torch.linspace(0.0, 1.2, 36).view(12, 3),)


def batch_alone():
    return torch.rand(12, 3)


number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)


def test_a_step_that_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "train.py:weighted"]) == 0
    assert capsys.readouterr().out == (
        "check              law                                          result\n"
        "check_replication  replicas stay equal                          passed\n"
        "check_equivalence  ranks do what one device does with all rows  passed\n"
    )


def test_parts_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "train.py:unweighted", "--parts", "1:1,1:1:1"]) == 0
    assert cli.main(["check", "train.py:unweighted"]) == 1
    assert "check_equivalence: params['w'] is not that on one" in capsys.readouterr().out


def test_a_step_that_both_checks_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "train.py:local"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 2
    assert "check_replication: result['w'] differs between ranks" in printed
    assert "check_equivalence: params['w']" in printed


def test_the_first_error_is_shown_if_ranks_part_in_the_second_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["check", "train.py:conditional"]) == 1
    printed = capsys.readouterr().out
    assert "check_replication: ranks would make different collective calls" in printed
    assert "check_equivalence raised" in printed


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["train.py:wieghted"], "'train.py' has no 'wieghted'; did you mean 'weighted'?"),
        (["train.py"], "where name is a training step"),
        (["train.py:number"], "train.py:number is a int, not a training step"),
        (["train.py:local", "--inputs", "inputs"], "'train.py' has no 'inputs'"),
        (
            ["train.py:local", "--inputs", "batch_alone"],
            "train.py:batch_alone must be a function that returns (state, batch), two tuples",
        ),
        (["train.py:local", "--inputs", "loss"], "train.py:loss needs the arguments params, x"),
        (["train.py:fails"], "check_replication of train.py:fails raised ValueError: no luck"),
        (["train.py:local", "--parts", "1:1,2"], "must be ratios such as 3:5,1:2:5, got '1:1,2'"),
    ],
)
def test_a_mistake_gets_one_line(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refused(["check", *argv], capsys)
