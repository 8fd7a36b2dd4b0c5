"""Numbers on the command line: refused by name, or results that are numbers."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

import fddp
from benchmarks import cli as bench
from fddp.cli import common, flight, simulate
from fddp.cli import plan as plan_command
from fddp.cli.demo import command as demo
from tests.support.commands import main
from tests.support.example_plans import example_plan

HOSTILE = ["nan", "inf", "-inf", "1e308", "5e-324", "-1", "0", "1e9", "1" + "0" * 30, "1" * 5000]
COUNTS = ["-1", "0", "1" + "0" * 30, "1" * 5000, "1e3", "nan", "\u0663"]
SIMULATE = ["simulate", "{plan}", "--topology", "w=2,x=3", "--json", "{json}"]
COMMANDS = (demo, plan_command, simulate, flight)
MODEL, TIMES = ["--cost=nvlink4"], ["--backward-ms=5"]


# Every option that takes a number, where it stands, and words around it.
NUMBERED = {
    "plan --bucket-cap-mb": [["plan", "{source}:net", "--bucket-cap-mb={}"]],
    "plan --first-bucket-mb": [["plan", "{source}:net", "--first-bucket-mb={}"]],
    "simulate --topology": [
        ["simulate", "{plan}", "--topology=w={}", "--json={json}", *MODEL, *TIMES]
    ],
    "simulate --cost": [
        [*SIMULATE, "--cost={},1e-9", *TIMES],
        [*SIMULATE, "--cost=1e-5,{}", *TIMES],
        [*SIMULATE, "--cost={file}", *TIMES],
    ],
    "simulate --caps": [
        [*SIMULATE, *MODEL, *TIMES, "--caps={}"],
        [*SIMULATE, *MODEL, *TIMES, "--caps=1,{}"],
    ],
    "simulate --backward-ms": [
        [*SIMULATE, *MODEL, "--backward-ms={}"],
        [*SIMULATE, *MODEL, "--backward-ms={}", "--jitter=10,0.5,1e9"],
    ],
    "simulate --ready": [[*SIMULATE, *MODEL, "--ready={file}", "--jitter=0.1,0.1,2"]],
    "simulate --jitter": [
        [*SIMULATE, *MODEL, *TIMES, "--jitter={}"],
        [*SIMULATE, *MODEL, *TIMES, "--jitter=0.1,{},2"],
        [*SIMULATE, *MODEL, *TIMES, "--jitter=0.1,0.5,{}"],
    ],
    "simulate --seed": [[*SIMULATE, *MODEL, *TIMES, "--jitter=0.1", "--seed={}"]],
    "demo --ranks": [["demo", "--ranks={}"]],
    "demo --epochs": [["demo", "--epochs={}"]],
    "demo --bucket-cap-mb": [["demo", "--bucket-cap-mb={}"]],
    "bench --ranks": [["bench", "--ranks={}"]],
    "bench --rounds": [["bench", "--rounds={}"]],
}
SOURCE = """
import torch
net = torch.nn.Linear(3, 2)
def step():
    return (lambda params: (params["w"] ** 2).sum()), {"w": torch.ones(3)}
"""


def test_every_option_that_takes_a_number_is_tried() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    for command in COMMANDS:
        command.add(commands)
    parsers = {**commands.choices, "bench": bench.parser()}
    found = {
        f"{name} {action.option_strings[0]}"
        for name, parser in parsers.items()
        for action in parser._actions
        if action.option_strings and action.nargs != 0
        if action.dest not in ("help", "json", "png", "trace", "algorithm", "models")
    }
    assert found == set(NUMBERED)


class LaunchedError(Exception):
    """Ranks would be started now."""


def refuse_to_launch(*_: object) -> None:
    raise LaunchedError


@pytest.mark.parametrize("option", NUMBERED)
def test_numbers_of_any_size(
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Refused by name, or results are numbers: no warning of NumPy's, no infinity."""
    for module in (common, bench):
        monkeypatch.setattr(module, "launched", refuse_to_launch)
    places = {"plan": str(tmp_path / "plan.json"), "json": str(tmp_path / "out.json")}
    places |= {"source": str(tmp_path / "module.py"), "file": str(tmp_path / "file.json")}
    Path(places["source"]).write_text(SOURCE)
    Path(places["plan"]).write_text(example_plan().to_json())
    for words in NUMBERED[option]:
        for number in COUNTS if "seed" in option or "ranks" in option else HOSTILE:
            as_json = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(number, number)
            content = f"[{as_json}, 0.2, 0.3, null, 0.5]"
            if option == "simulate --cost":
                content = fddp.PRESETS["nvlink4"].to_json()
                content = content.replace('"overlap": 1.0', f'"overlap": {as_json}')
            Path(places["file"]).write_text(content)
            argv = [word.format(number, **places) for word in words]
            try:
                code: Any = main(argv)
            except SystemExit as ended:
                code = ended.code
            except LaunchedError:
                code = 0
            printed = capsys.readouterr()
            assert code in (0, 2), argv
            assert (code == 2) == printed.err.startswith("python -m "), argv
            assert not re.search(r"\b(nan|inf)\b", printed.out), argv
