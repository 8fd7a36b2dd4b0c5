"""The worked examples: each holds its checks, and a wrong one does not."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import fddp
from examples import common
from examples.common import Check, Report, difference, difference_between_ranks
from tests.support.pages import ROOT, read
from tests.support.programs import run_python, torchrun

if TYPE_CHECKING:
    from tests.support.ranks import RankPool

# torch.func.jvp compiles decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

SAMPLE = "dp_sgd"  # of `make test`; the others run in `make nightly`
NAMES = [
    name if name == SAMPLE else pytest.param(name, marks=pytest.mark.nightly)
    for name in (
        *("maml", "hvp_cg", "dp_sgd", "ensemble", "physics", "fsdp2"),
        *("adascale", "batch_size"),
    )
]


def local(tree: Any) -> Any:
    """A collective of one rank: its own value."""
    return tree


def load_nothing(state: Any, checkpoint_id: str) -> None:
    """Leaves the state as it was."""


def uniform(params: Any, batch: Any) -> float:
    """Each rank counts the same, however many samples it has."""
    return 1.0


def linear(noise: Any, ranks: int) -> float:
    """The learning rate grows with the number of ranks, whatever the noise is."""
    return float(ranks)


#: how each example is broken, and the checks that must then fail
BROKEN: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "maml": ({"average": local}, ("spread tasks, from one process",)),
    "hvp_cg": (
        {"average": fddp.psum},
        ("product, from one process", "parameters, from one process"),
    ),
    "dp_sgd": (
        {"total": local},
        ("parameters, between ranks", "parameters, from one process", "sigma, from the stated one"),
    ),
    "ensemble": ({"weight_fn": uniform}, ("all models, from one process",)),
    "physics": ({"weight_fn": uniform}, ("parameters, from one process",)),
    "fsdp2": ({"load": load_nothing}, ("resumed, from the same run",)),
    "adascale": ({"gain_of": linear}, ("loss, from one rank's",)),
    "batch_size": ({"weight_fn": uniform}, ("noise scale, from the known one",)),
}


def run(rank: int, world_size: int, name: str, options: dict[str, Any]) -> Report:
    if name == "fsdp2":  # over a default group of its own
        store = dist.PrefixStore(name, _get_default_store())
        dist.destroy_process_group()
        dist.init_process_group("fddp", store=store, rank=rank, world_size=world_size)
    report = importlib.import_module(f"examples.{name}").example(**options)
    assert isinstance(report, Report)
    return report


@pytest.mark.parametrize("name", NAMES)
def test_ranks_match_one_process(ranks: RankPool, name: str) -> None:
    for report in ranks.run(2, run, name, {}):
        assert report.passed, report.checks
        assert len(report.checks) >= 2


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dp_sgd", "ensemble"])
def test_on_other_numbers_of_ranks(ranks: RankPool, name: str) -> None:
    for report in (*ranks.run(1, run, name, {}), *ranks.run(3, run, name, {})):
        assert report.passed, report.checks


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_example_fails_its_checks(ranks: RankPool, name: str) -> None:
    options, expected = BROKEN[name]
    for report in ranks.run(2, run, name, options):
        failed = tuple(check for check, found in report.checks.items() if not found.passed)
        assert not report.passed
        assert set(failed) == set(expected), report.checks


@pytest.mark.parametrize("name", ["adascale", "batch_size"])
def test_a_figure_is_written(name: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"examples.{name}")
    numbers: dict[str, list[float]] = defaultdict(lambda: [1.0, math.inf, 3.0])
    module.plot(numbers).savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


# The page


def test_the_page_names_every_script() -> None:
    package = ROOT / "examples"
    scripts = {path.stem for path in package.glob("*.py")} - {"__init__", "common"}
    assert set(re.findall(r"^\| `(\w+)` \|", read("docs/examples.md"), re.MULTILINE)) == scripts


# The table, and how a script ends


GOOD, BAD = Check(1e-16, 1e-10), Check(float("nan"), 1e-10)


@pytest.mark.parametrize("check", [Check(0.1, 0.0), Check(2e-10, 1e-10), BAD])
def test_a_check_fails(check: Check) -> None:
    assert not check.passed
    assert str(check).startswith("FAILED: ")
    assert not Report("some", [], {"good": GOOD, "bad": check}).passed


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    common.show(Report("some", [("a row", "1.0", "remark")], {"a check": GOOD, "worse": BAD}))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for text in ("a row", "remark", "1.0e-16", "passed: at most 1e-10", "FAILED: at most 1e-10"):
        assert text in printed


def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert common.main("dp_sgd", []) == 2
    assert capsys.readouterr().err == "dp_sgd needs rich: pip install fddp[examples]\n"


def differing(rank: int, world_size: int) -> tuple[float, float]:
    tree = {"a": torch.ones(3, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}
    same = difference_between_ranks(tree)
    tree["a"][1] += 0.25 * rank
    return same, difference_between_ranks(tree)


def test_a_diverged_rank_is_reported_on_all(ranks: RankPool) -> None:
    assert ranks.run(3, differing) == [(0.0, 0.5)] * 3
    assert difference({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([1.0, 2.5])}) == 0.5


_SCRIPT = """
import sys
from examples import common, dp_sgd
example = dp_sgd.example
dp_sgd.example = lambda: example(total=lambda tree: tree)
sys.exit(common.main("dp_sgd", []))
"""


@pytest.mark.nightly
def test_a_broken_example_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    done = torchrun("script.py", cwd=tmp_path, code=1)
    (printed,) = done.stdout.split("DP-SGD, ")[1:]  # by rank 0 alone
    assert printed.count("FAILED") == 3


@pytest.mark.nightly
def test_a_script_without_torchrun() -> None:
    done = run_python("-m", "examples.dp_sgd", "--ranks", "1")
    assert "DP-SGD, 48 samples on 1 rank," in done.stdout
