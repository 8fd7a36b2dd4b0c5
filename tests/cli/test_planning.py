"""The commands that plan and simulate: what they print, write, and refuse."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fddp
from fddp.core.plan.plan import BucketPlan
from fddp.core.sim.cost import PRESETS, CostModel
from tests.support import commands as cli
from tests.support.commands import refused

MODELS = """
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Sizes:
    width: "int" = 256


def network():
    layers = nn.Sequential(*(nn.Linear(Sizes().width, 256) for _ in range(8)))
    layers[0].requires_grad_(False)
    return layers


def tree():
    return {"[bold]layers": [torch.zeros(512, 512), torch.zeros(512)], "count": torch.tensor(1)}


def fails():
    raise ValueError("no\\nluck")


def sized(width, depth, *, bias=True):
    return [torch.zeros(width) for _ in range(depth)]


def nothing():
    return {"count": torch.tensor(1)}


module = nn.Linear(4, 4)
leaf = torch.zeros(3)
number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with `own_models.py` and modules that can't be imported."""
    (tmp_path / "own_models.py").write_text(MODELS)
    (tmp_path / "needs_more.py").write_text("import not_there\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("own_models", "needs_more", "broken", "leaves"):
        sys.modules.pop(name, None)
        sys.modules.pop(f"fddp_source_{name}", None)


Read = Callable[..., str]


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Read:
    """Runs a command that goes well; what it prints."""

    def read(*argv: str) -> str:
        assert cli.main(argv) == 0
        return capfd.readouterr().out

    return read


SIMULATE = ("simulate", "own_models:network", "--backward-ms", "10", "--caps", "0.5,1,25")
LINK = ("--topology", "world=4", "--cost", "1e-4,1e-9")


# plan


@pytest.mark.parametrize("source", ["own_models:network", "own_models.py:network"])
def test_plan_of_a_module(source: str, run: Read, folder: Path) -> None:
    printed = run("plan", source, "--bucket-cap-mb", "1", "--json", "p.json", "--png", "p.png")
    plan = BucketPlan.from_json((folder / "p.json").read_text())
    assert "2 buckets, 14 of 14 leaves, 1.757 MiB, caps 1 MiB, 1 MiB" in printed
    assert "7.bias" in printed
    assert "1.weight" in printed  # the frozen first layer is not there
    assert plan.digest in printed
    assert plan.caps_bytes == (2**20, 2**20)
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "written to p.json" in printed
    assert "written to p.png" in printed
    # What was written is a source as well.
    assert plan.digest in run("plan", "p.json")


def test_plan_of_a_tree_is_that_of_plan_buckets(run: Read) -> None:
    printed = run("plan", "own_models:tree", "--first-bucket-mb", "0.5")
    tree = {"[bold]layers": [torch.zeros(512, 512), torch.zeros(512)], "count": torch.tensor(1)}
    assert fddp.plan_buckets(tree, first_bucket_mb=0.5).digest in printed
    assert "[bold]layers.1" in printed


def test_plans_and_simulations_need_no_extra(run: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rich", "matplotlib", "sklearn"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    for value in ("module", "leaf"):  # a value that is no function
        assert "1 bucket, " in run("plan", f"own_models:{value}")
    assert "fastest: " in run(*SIMULATE, *LINK)


@pytest.mark.parametrize("columns", [80, 200])
def test_a_plan_fits_the_terminal(
    columns: int, run: Read, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths lose their beginning; into a pipe, nothing."""
    long = ".".join(["encoder"] * 12)
    (folder / "own_models.py").write_text(
        f"import torch\ntree = {{'{long}.weight': torch.ones(3)}}"
    )
    assert f"{long}.weight" in run("plan", "own_models.py:tree")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("plan", "own_models.py:tree").splitlines()[:3]
    assert columns - 2 <= max(map(len, lines)) <= columns
    assert lines[2].count("der.weight") == 2


@pytest.mark.parametrize("command", [[], ["plan"], ["simulate"], ["flight"], ["demo"]])
def test_help_fits_80_columns(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_an_interrupt_while_the_source_is_imported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "slow.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "slow.py:tree"])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "python -m fddp plan: ended by SIGINT\n"


def test_json_on_stdout_is_all_there_is(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "own_models:network", "--json", "-", "--png", "p.png"]) == 0
    printed = capfd.readouterr()
    assert len(BucketPlan.from_json(printed.out).buckets) == 2
    assert "14 of 14 leaves" in printed.err
    assert "written to p.png" in printed.err


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("own_models", "'own_models' must be package.module:name or file.py:name, where name is"),
        ("own_models:a b", "must be package.module:name or file.py:name"),
        ("own_models:nope", "'own_models' has no 'nope'"),
        ("own_models:netwrk", "'own_models' has no 'netwrk'; did you mean 'network'?"),
        (
            "own_models:sized",
            "own_models:sized needs the arguments width, depth, and is called without any; name a "
            "function that calls it, such as: def make(): return sized(...)",
        ),
        ("no.such:thing", "there is no module 'no'"),
        ("own_models.more:thing", "there is no module 'own_models.more'"),
        ("needs_more:thing", "importing 'needs_more' raised ModuleNotFoundError: No module named"),
        ("broken:f", "importing 'broken' raised SyntaxError: "),
        ("broken.py:f", "importing 'broken.py' raised SyntaxError: "),
        ("leaves:f", "importing 'leaves' raised SystemExit: 3"),
        ("nope.py:f", "there is no file 'nope.py'"),
        ("own_models:fails", "own_models:fails raised ValueError: no luck ("),
        ("own_models:nothing", "own_models:nothing: there is nothing to reduce"),
        ("own_models:number", "own_models:number: "),
        ("nope.json", "can't read 'nope.json': No such file or directory"),
        ("wrong.json", "wrong.json: plan JSON: "),
        ("binary.json", "binary.json: 'utf-8' codec can't decode"),
    ],
)
def test_a_source_that_can_not_be_planned_gets_one_line(
    source: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "wrong.json").write_text("{}")
    (folder / "binary.json").write_bytes(b"\xff\xff")
    for command, options in ("plan", []), ("simulate", [*LINK, "--backward-ms", "1"]):
        line = refused([command, source, *options], capsys)
        assert line.startswith(f"python -m fddp {command}: error: ")
        assert text in line


def test_a_raising_factory_is_shown_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(["plan", "own_models:fails"], capsys)
    number = MODELS.splitlines().index('    raise ValueError("no\\nluck")') + 1
    assert line.endswith(f"own_models.py, line {number})\n")


def test_the_caps_of_a_plan_are_fixed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "own_models:network", "--json", "p.json"]) == 0
    capsys.readouterr()
    line = refused(["plan", "p.json", "--bucket-cap-mb", "5"], capsys)
    assert "'p.json' is a plan, so its caps are fixed" in line


def test_a_file_that_can_not_be_written_gets_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "taken").symlink_to("taken")
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "own_models:network", "--json", "taken"])
    assert caught.value.code == 2
    assert capfd.readouterr().err.startswith("python -m fddp plan: error: can't write 'taken': ")


@pytest.mark.parametrize(
    ("way", "code", "text"),
    [
        ("full", 1, "python -m fddp plan: error: [Errno 28] No space left on device\n"),
        ("pipe", 1, ""),
    ],
)
def test_output_that_can_not_be_written_ends_with_1(
    way: str,
    code: int,
    text: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A reader that exits early, as `head` does, is no error to be reported."""
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full" if way == "full" else writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        try:
            found = cli.main(["plan", "own_models:network"])
        except SystemExit as ended:
            found = int(str(ended.code))
    assert (found, capsys.readouterr().err) == (code, text)


# simulate


def documented(run: Read, *argv: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(*argv, "--json", "-"))
    return document


def test_simulate_compares_caps_and_the_best_plan(run: Read, folder: Path) -> None:
    printed = run(*SIMULATE, *LINK, "--json", "s.json", "--trace", "t.json", "--png", "s.png")
    document = json.loads((folder / "s.json").read_text())
    names = ["cap 512 KiB", "cap 1 MiB", "cap 25 MiB", "optimal"]
    assert [row["plan"] for row in document["results"]] == names
    assert [row["cap_mb"] for row in document["results"]] == [0.5, 1.0, 25.0, None]
    for row in document["results"]:
        assert f"{row['step_s'] * 1e3:.3f}" in printed
        assert row["step_s"] == pytest.approx(row["backward_s"] + row["exposed_s"])
    assert "all_reduce on Topology(world=4)" in printed
    assert "ready times assumed: in proportion to size" in printed
    assert (folder / "s.png").read_bytes().startswith(b"\x89PNG")
    best = BucketPlan.from_json(json.dumps(document["fastest_plan"]))
    fastest = min(document["results"], key=lambda row: row["step_s"])
    assert document["fastest"] == fastest["plan"]
    assert best.digest == fastest["digest"]
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    last_us = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last_us == pytest.approx(fastest["step_s"] * 1e6)


def test_simulate_matches_the_library(run: Read) -> None:
    rows = documented(run, *SIMULATE, *LINK)["results"]
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    params = dict(list(layers.named_parameters())[2:])
    plan = fddp.plan_buckets(params, bucket_cap_mb=25.0)
    total = sum(leaf.numel for leaf in plan.leaves)
    ready_s, at = [math.nan] * len(plan.leaves), 0
    for leaf in plan.order:
        at += plan.leaves[leaf].numel
        ready_s[leaf] = 0.01 * at / total
    schedule = fddp.make_schedule(plan, fddp.Topology(world=4))
    timeline = fddp.simulate(schedule, CostModel(1e-4, 1e-9), ready_s)
    assert rows[2]["digest"] == plan.digest
    assert rows[2]["step_s"] == pytest.approx(timeline.step_s)
    assert rows[2]["hidden_fraction"] == pytest.approx(timeline.hidden_fraction)
    optimal = fddp.plan_optimal(params, ready_s, CostModel(1e-4, 1e-9), topology=schedule.topology)
    assert rows[3]["digest"] == optimal.digest
    small = fddp.plan_buckets(params, bucket_cap_mb=0.5, first_bucket_mb=0.5)
    assert rows[0]["digest"] == small.digest


def test_a_plan_is_simulated_as_given(run: Read) -> None:
    run("plan", "own_models:network", "--bucket-cap-mb", "0.7", "--json", "p.json")
    printed = run("simulate", "p.json", *SIMULATE[2:], *LINK, "--json", "-")
    first = json.loads(printed)["results"][0]
    assert (first["plan"], first["cap_mb"]) == ("as given", None)
    assert first["digest"] in run("plan", "p.json")


def test_measured_ready_times(run: Read, folder: Path) -> None:
    times = {f"{layer}.{name}": 0.02 for layer in range(1, 8) for name in ("weight", "bias")}
    options = ("simulate", "own_models:network", *LINK, "--caps", "0.01", "--ready", "r.json")
    # The first layers' gradients are there first, and one has none.
    (folder / "r.json").write_text(json.dumps({**times, "1.weight": 0.001, "2.bias": None}))
    row = documented(run, *options)["results"][0]
    assert row["backward_s"] == 0.02
    assert row["hidden_fraction"] > 0.0
    assert "ready times read from r.json" in run(*options)
    (folder / "r.json").write_text(json.dumps([0.03] * 14))
    row = documented(run, *options)["results"][0]
    assert (row["backward_s"], row["hidden_fraction"]) == (0.03, 0.0)


READY = ("simulate", "own_models:network", *LINK, "--ready", "r.json")
SQUARE = (*SIMULATE, "--topology", "host=2,local=2")


@pytest.mark.parametrize(
    ("text", "options", "complaint"),
    [
        ("{", READY, "r.json: not a JSON document: "),
        ('["soon"]', READY, "r.json: must hold an object or a list of seconds (or null)"),
        (f"[{', '.join(['true'] * 14)}]", READY, "must hold an object or a list of seconds"),
        ("[1, 2]", READY, "must have one time for each of the 14 leaves"),
        ('{"1.weight": 1}', READY, "needs '1.bias' and 12 more"),
        (f"[{', '.join(['-1'] * 14)}]", READY, "must be from 0 to 1e+09"),
        (None, READY, "can't read 'r.json': No such file or directory"),
        (None, (*SQUARE, "--cost", "host=1,1"), "--cost must be given once, or once for each axis"),
        (None, (*SQUARE, "--cost", "1,1", "--cost", "1,1"), "got it for all, all"),
        (None, (*SQUARE, "--cost", "host=1,1", "--cost", "rack=1,1"), "got it for host, rack"),
        (
            None,
            (*SQUARE, "--cost", "host=1,1", "--cost", "local=1,1", "--cost", "host=2,2"),
            "got it for host, local, host",
        ),
        (
            None,
            (*SIMULATE, *LINK, "--algorithm", "hierarchical"),
            "'hierarchical' needs a topology with at least two axes",
        ),
    ],
)
def test_ready_times_and_costs_must_fit(
    text: str | None,
    options: tuple[str, ...],
    complaint: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is not None:
        (folder / "r.json").write_text(text)
    assert complaint in refused([*options], capsys)


def test_costs_by_axis(run: Read, folder: Path) -> None:
    model = CostModel(1e-6, 1e-10, "direct", overlap=0.5)
    (folder / "fast.json").write_text(model.to_json())
    document = documented(
        run,
        *SIMULATE,
        "--topology",
        "host=3,local=4",
        "--algorithm",
        "hierarchical",
        "--cost",
        "host=ethernet-10g,tree",
        "--cost",
        "local=fast.json",
    )
    host = PRESETS["ethernet-10g"]
    assert document["topology"] == {"host": 3, "local": 4}
    assert document["cost"]["host"]["alpha_s"] == host.alpha_s
    assert document["cost"]["host"]["algorithm"] == "tree"
    assert CostModel(**document["cost"]["local"]) == model


def test_an_axis_of_one_rank_needs_no_cost(run: Read) -> None:
    mesh = ("--topology", "host=1,local=4")
    costs = ("--cost", "local=1e-4,1e-9"), ("--cost", "local=1e-4,1e-9", "--cost", "host=1,1")
    one, both = (documented(run, *SIMULATE, *mesh, *cost)["results"] for cost in costs)
    assert one == both


def test_jitter_is_seeded_and_slows_the_step(run: Read) -> None:
    def step_s(*options: str) -> float:
        value: float = documented(run, *SIMULATE, *LINK, *options)["results"][0]["step_s"]
        return value

    jitter = ("--jitter", "0.1,0.5,2")
    assert step_s(*jitter) == step_s(*jitter, "--seed", "0") != step_s(*jitter, "--seed", "1")
    assert step_s("--jitter", "0") == step_s()
    assert step_s("--jitter", "0,1,2") > step_s()
