"""The stored outputs of the notebooks have what the text beside them claims."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import nbformat
import numpy as np
import pytest

from fddp.viz import canvas
from tests.support.notebooks import NOTEBOOKS

MOST_CELLS = 25
#: numbers with an exponent, too
NUMBER = r"(-?\d[\d,]*\.?\d*(?:e[+-]\d+)?)"


class Stored:
    """A notebook as it is kept."""

    def __init__(self, path: Path) -> None:
        self.cells = nbformat.read(path, as_version=4).cells
        self.prose = "\n".join(c.source for c in self.cells if c.cell_type == "markdown")
        shown = []
        for cell in self.cells:
            for output in cell.get("outputs", []):
                shown.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
        self.shown = "\n".join(shown)

    def claims(self, *texts: str) -> None:
        """Require sentences, so that a claim that changes is not checked as it was."""
        prose = " ".join(self.prose.split())
        for text in texts:
            assert text in prose, f"the text no longer claims {text!r}"

    def numbers(self, pattern: str) -> list[float]:
        """Return the number that stands for # in each match of a pattern."""
        found = re.findall(pattern.replace("#", NUMBER), self.shown)
        assert found, f"no output has {pattern!r}"
        return [float(number.replace(",", "")) for number in found]

    def number(self, pattern: str) -> float:
        (number,) = self.numbers(pattern)
        return number


def plans(notebook: Stored) -> None:
    notebook.claims(
        "A block has 1632 MiB", "most matrices alone hold more", "restored without loss"
    )
    assert notebook.number("# MiB a block") == 1632
    buckets = notebook.number("# buckets; ")
    assert notebook.number(r"; # are one leaf") >= buckets / 2
    assert notebook.number("# over twice their cap") > buckets / 2
    assert "\nTrue True\n" in notebook.shown
    assert "order must hold each bucketed leaf once" in notebook.shown
    assert re.search(r"BucketPlan: \d+ buckets, 184 of 184 leaves", notebook.shown), "the last cell"


def schedules(notebook: Stored) -> None:
    notebook.claims(
        "Six mistakes:", "the same time for 8 ranks and for 100,000", "both have the mean"
    )
    mistakes = re.findall(r"^(\w[\w ]+):\nop \d+ \(", notebook.shown, re.MULTILINE)
    assert len(mistakes) == 6
    few_ms, many_ms = notebook.numbers("proved in # ms")
    assert max(few_ms, many_ms) < 3.0 * min(few_ms, many_ms)
    assert notebook.number("schedules, # of them changed, all proved") > 0
    assert notebook.shown.count("1.5000") == 12


def simulation(notebook: Stored) -> None:
    notebook.claims(
        "nearly the measured order",
        "near to the fastest measured one",
        "Most times are predicted too low",
    )
    assert notebook.number("rank correlation #") >= 0.8
    for what in ("simulated", "measured"):
        assert notebook.number(rf"slowest plan / fastest plan, {what}: #") >= 1.5
    assert notebook.number(r"beside the fastest measured: \+#%") <= 20.0
    simulated = notebook.numbers(r"buckets: simulated +# ms")
    measured = notebook.numbers(r"buckets: simulated +[\d.]+ ms, measured +# ms")
    assert len(simulated) == len(measured) == 9
    assert min(simulated) == simulated[-1], "the optimal plan"
    assert max(measured) == measured[0], "buckets of one layer"
    assert sum(a < b for a, b in zip(simulated, measured, strict=True)) >= 5
    buckets = notebook.numbers(r"# buckets: simulated +[\d.]+ ms")
    orders = [np.argsort(np.argsort(values)) for values in (buckets, measured)]
    *_, caps, optimal = zip(simulated, measured, strict=True)
    notebook.claims(
        f"a naive model, has a rank correlation of {np.corrcoef(orders)[0, 1]:.2f} with",
        f"half of them by {notebook.number('median error of the simulated times #%'):.0f}% or more",
        f"was predicted {1 - optimal[0] / caps[0]:.0%} faster than DDP's caps, and was measured "
        f"{1 - optimal[1] / caps[1]:.0%} faster",
    )
    notebook.claims("almost the reverse order", "the fewest buckets are the fastest")
    assert notebook.number("with the measured times, simulator: #") < -0.5
    assert notebook.number("rank correlation, number of buckets: #") > 0.8
    few, many = (
        np.mean(notebook.numbers(rf"{count} [a-d] +simulated +[\d.]+ ms, measured +# ms"))
        for count in (3, 12)
    )
    notebook.claims(f"about {(many - few) / 9:.1f} ms here")
    checks = next(cell.source for cell in notebook.cells if "np.corrcoef" in cell.source)
    assert "if correlation < 0.8:\n    raise" in checks
    assert "if spread < 1.5:\n        raise" in checks
    steps = re.findall(
        r"^ *(\d+) +[\d.]+ ms +([\d.]+) ms +[\d.]+ ms +([\d.]+) ms$", notebook.shown, re.M
    )
    assert steps[-1][0] == "10000"
    assert all(float(hierarchical) < float(flat) for _, flat, hierarchical in steps)


def loop(notebook: Stored) -> None:
    notebook.claims(
        "All ranks end with the same bits", "up to rounding", "keeps the faster", "compare the ends"
    )
    assert notebook.numbers("from rank 0 #,") == [0.0] * 4
    assert max(notebook.numbers("from one process #")) < 1e-12
    gain = re.findall(r"measured .*\(([+-])[\d.]+% gain\): the (\w+) plan", notebook.shown)
    assert gain in ([("+", "new")], [("+", "old")], [("-", "old")])


def derivatives(notebook: Stored) -> None:
    notebook.claims(
        "gives the result of one process", "so it raises an error", "names the line at which"
    )
    assert notebook.number("\npmean: off by #") < 1e-12
    assert notebook.number("detached gradients: off by #") > 1e-3
    assert notebook.number("own gradient: off by #") > 1e-3
    assert notebook.shown.count("passed:") == 3
    assert "failed:" not in notebook.shown
    assert "the tree of gradients itself was computed" in notebook.shown
    assert "result differs between ranks: it depends on `x` and `y`" in notebook.shown


def jax(notebook: Stored) -> None:
    notebook.claims(
        "All ranks have the same bits", "The gradients have the same bits on both ranks"
    )
    assert notebook.numbers("from rank 0 #,") == [0.0] * 3
    assert max(notebook.numbers("from one process:? #")) < 1e-6
    assert notebook.number("wrong rounds: #") == 0
    assert notebook.number("differ by at most #") < 1e-6
    assert "\x1b" not in notebook.shown


def literature(notebook: Stored) -> None:
    notebook.claims(
        "must never be worse on the same model", "BERT agrees", "Most of these are missed"
    )
    assert notebook.number("optimal to greedy: #") <= 1.0
    assert 40 <= notebook.number("BERT-large, NCCL: best #") <= 60
    alpha_ms = notebook.number("alpha: # ms")
    assert max(notebook.numbers("leaves at most # ms a tensor")) < alpha_ms
    assert max(notebook.numbers(r"median deviation #%")) <= 10.0
    assert len(re.findall(r"'\d+B, ", notebook.shown)) <= 1


def few_bytes(notebook: Stored) -> None:
    notebook.claims("less than 1/50 of DDP's, within 2% of its loss", "miss the 2% by a little")
    rows = {
        name.strip(): (float(part), float(beside))
        for name, part, beside in re.findall(
            r"^(\S.*?) +[\d.]+ MiB +1/([\d.]+) .*?([+-][\d.]+)%", notebook.shown, re.MULTILINE
        )
    }
    assert len(rows) == 6
    for name, (part, beside) in rows.items():
        if "bits" in name:
            assert part > 50.0
            assert beside < 2.0
        elif "H=50" in name:
            assert part == 50.0
            assert 2.0 < beside < 3.0
    reached = notebook.shown.partition("1/50 of the bytes, within 2%:")[2]
    assert len(re.findall(r"^  \S", reached, re.MULTILINE)) == 3


CLAIMS: dict[str, Callable[[Stored], None]] = {
    "01_bucket_plans": plans,
    "02_schedules": schedules,
    "03_simulate_and_tune": simulation,
    "04_training_loop": loop,
    "05_torch_func": derivatives,
    "06_jax": jax,
    "07_literature": literature,
    "08_few_bytes": few_bytes,
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_have_what_the_text_claims(path: Path) -> None:
    CLAIMS[path.stem](Stored(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_one_question_and_one_answer(path: Path) -> None:
    cells = Stored(path).cells
    assert len(cells) <= MOST_CELLS
    title = cells[0].source.splitlines()[0]
    assert re.fullmatch(r"# .*[^?]\?", title)
    answers = [number for number, cell in enumerate(cells) if "**Answer**" in cell.source]
    assert answers == [len(cells) - 1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_figures_have_the_colours_of_viz(path: Path) -> None:
    """Every line and bar of a notebook has one, not matplotlib's own."""
    known = {value for name, value in vars(canvas).items() if name.isupper() and "#" in str(value)}
    known |= {"#56B4E9"}  # the sixth of the same palette, as in figures of ranks
    code = "\n".join(cell.source for cell in Stored(path).cells if cell.cell_type == "code")
    assert set(re.findall(r"#[0-9A-F]{6}\b", code)) <= known
    for call in re.findall(r"\.(?:plot|bar|hist|axhline|axvline)\((?:[^()]|\([^()]*\))*\)", code):
        assert "color=" in call or '"k--"' in call, call
