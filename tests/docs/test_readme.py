"""The README runs as printed, and says nothing that no test shows."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import fddp
from tests.support.commands import main
from tests.support.models import same_bits
from tests.support.pages import ROOT, commands, read, run_script
from tests.support.programs import run_program

PAGE = "README.md"

_SAVE = """
import os
torch.save(params, f"{os.environ['RANK']}.pt")
"""

_EXAMPLES = {f"examples.{path.stem}" for path in (ROOT / "examples").glob("*.py")}


def test_loop_runs_as_printed(tmp_path: Path) -> None:
    run_script(PAGE, tmp_path, epilogue=_SAVE)
    trained = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert same_bits(trained)
    assert trained[0]["w"].flatten().tolist() == pytest.approx([1.0, -2.0, 3.0], abs=0.05)


@pytest.mark.parametrize("command", commands(PAGE))
def test_shell_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    match words:
        case ["make", target]:
            run_program("make", "--dry-run", target)
        case ["python" | ".venv/bin/python", "-m", "fddp" | "benchmarks", *_]:
            _check_options(words, capsys)
        case ["pip", "install", *options, source]:
            _check_install(source, options)
        case ["torchrun", "--nproc-per-node", "2", "train.py"]:
            pass  # test_loop_runs_as_printed does this
        case ["torchrun", "--nproc-per-node", "2", "-m", module] if module in _EXAMPLES:
            pass  # test_examples.py and test_jax_examples.py run them
        case _:
            pytest.fail(f"no check for the command {command!r}")


def _check_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench"] if words[2] == "benchmarks" else words[3:4]
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*command, "--help"])
    printed = capsys.readouterr().out
    assert not [word for word in words if word.startswith("--") and word not in printed]


def _check_install(source: str, options: list[str]) -> None:
    assert options in ([], ["--no-build-isolation"])
    extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", source)
    assert extras is not None
    known = metadata("fddp").get_all("Provides-Extra", [])
    assert set((extras[1] or "demo").split(",")) <= set(known)


def test_each_case_beside_ddp_has_a_test() -> None:
    """The README shows six of them, in the words of the page."""
    section = read("docs/ddp.md").split("## Comparison\n")[1].split("\n## ")[0].split("\n### ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "][2:]
    assert len(rows) == 13
    for *_, shown in rows:
        file, function = shown.strip("`").split("::")
        assert f"def {function}(" in read(file), f"{file} has no {function}"
    picked = read(PAGE).split("## In place of DDP\n")[1].split("\n## ")[0]
    lines = [line.strip("| ") for line in picked.splitlines() if line[:2] == "| "][2:]
    assert len(lines) == 6
    assert {*lines} <= {" | ".join(row[:-1]) for row in rows}


def test_requirements_are_those_of_the_package() -> None:
    package = metadata("fddp")
    wanted = [f"python{package['Requires-Python']}", *package.get_all("Requires-Dist", [])]
    for name, shown in (("python", "Python"), ("torch", "PyTorch")):
        (version,) = [w.removeprefix(f"{name}>=") for w in wanted if w.startswith(f"{name}>=")]
        assert f"{shown} ≥ {version}" in read(PAGE)


def _unused_on_rank_1(group: Any, flag: bool) -> float:
    """The gradient of a parameter that rank 1 does not use; the next forward may raise."""
    module = torch.nn.ModuleDict({"both": torch.nn.Linear(1, 1), "one": torch.nn.Linear(1, 1)})
    ddp = fddp.DistributedDataParallel(
        _Chosen(module), process_group=group, find_unused_parameters=flag
    )
    x = torch.ones(1, 1)
    ddp(x, group.rank == 0).sum().backward()
    found = module["one"].bias.grad
    assert found is not None
    if flag:
        ddp(x, True)
    else:
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            ddp(x, True)
    return found.item()


class _Chosen(torch.nn.Module):
    def __init__(self, parts: torch.nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor, with_one: bool) -> torch.Tensor:
        both: torch.Tensor = self.parts["both"](x)
        return both + self.parts["one"](x) if with_one else both


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")  # on rank 0
@pytest.mark.parametrize("flag", [False, True])
def test_the_row_on_unused_parameters(flag: bool) -> None:
    """The wrapper has the mean in the same step, and by default DDP's error in the next."""
    assert fddp.loopback(2, lambda group: _unused_on_rank_1(group, flag)) == [0.5, 0.5]
