"""The guide's table of operators is true of each operator."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.func import jvp, vjp

import fddp
import fddp.jax
from fddp.collectives import execute
from fddp.transport.operation import SUMMABLE_DTYPES
from tests.support.collectives import OPERATORS
from tests.support.pages import read

TEXT = read("docs/guide/operators.md")
HEAD, *LINES = re.findall(r"^\| (.*) \|$", TEXT, re.MULTILINE)
ROWS = {
    cells[0].strip("`"): dict(zip(HEAD.split(" | "), cells, strict=True))
    for cells in (line.split(" | ") for line in LINES[1:])
}
SHAPES = {"s": (3,), "(n, *s)": (2, 3)}
OTHER_DTYPES = {torch.bool, torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn}


def operator(name: str, group: Any, **options: Any) -> Callable[[Any], Any]:
    more = (0,) if name == "broadcast_from" else ()
    return lambda tree: getattr(fddp, name)(tree, *more, group, **options)


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_operator_has_a_row() -> None:
    assert sorted(ROWS) == sorted(OPERATORS)
    in_jit = [name for row in ROWS.values() for name in named(row["In `jax.jit`"])]
    assert set(in_jit) == {*OPERATORS, "grad_sync"} & {*dir(fddp.jax)}


@pytest.mark.parametrize("name", ROWS)
def test_shapes_and_collectives(name: str) -> None:
    before, *changed = (SHAPES[shape] for shape in named(ROWS[name]["Leaf to result"]))
    after = changed[0] if changed else before
    cell = ROWS[name]["Collective"].replace("-", "_")
    _, _, later = cell.partition("; ")
    once = [kind for kind in re.findall(r"^\w+", cell) if kind != "none"]

    def run(group: Any) -> None:
        mesh = fddp.Topology(row=1, column=2)
        with fddp.Communicator(group, mesh=mesh) as ranks:
            start, issued = ranks.transport._start, []

            def noted(operation: Any) -> Any:
                issued.append(operation.kind)
                return start(operation)

            ranks.transport._start = noted  # type: ignore[method-assign]
            leaves = {"a": torch.ones(before), "b": torch.ones(before), "empty": torch.ones(2, 0)}
            results = operator(name, ranks)({**leaves, "none": None})
            assert results["a"].shape == after
            assert results["empty"].numel() == 0
            assert results["none"] is None
            assert issued == ["all_gather", *once][: 2 * len(once)]
            if "along" in later:
                issued.clear()
                operator(name, ranks, axis="column")(leaves)
                assert issued == ["all_gather", later.split()[0]]
            if "backward" in later:
                vjp(operator(name, ranks), leaves)[1](leaves)
                assert issued == ["all_gather", later.split()[0]]

    fddp.loopback(2, run)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch.func.jvp
@pytest.mark.parametrize("name", ROWS)
def test_derivatives(name: str) -> None:
    """On one rank, in the names of operators that run."""
    found: list[str] = []
    pack = execute._pack

    def noted(call: Any, *args: Any) -> Any:
        found.append(" of ".join([*call.roles, call.program.operator]))
        return pack(call, *args)

    def run(group: Any) -> None:
        x = torch.ones(1, 3)
        fn = operator(name, group)
        y, pull = vjp(fn, x)
        pull(y)
        jvp(fn, (x,), (x,))

    forward = [] if name == "sync_on_backward" else [name]
    transpose = named(ROWS[name]["Transpose"]) or ["sum_to"]
    tangents = named(ROWS[name]["Tangents"])
    with mock.patch.object(execute, "_pack", noted):
        fddp.loopback(1, run)
    assert found == [
        *forward,
        *(f"backward of {adjoint}" for adjoint in transpose),
        *forward,
        *(f"jvp of {linear}" for linear in tangents),
    ]


@pytest.mark.parametrize("name", ROWS)
def test_dtypes(name: str) -> None:
    (summable,) = re.findall(r"Summable dtypes are\s([^;]*);", TEXT)
    dtypes = {getattr(torch, word) for word in re.findall(r"\w+\d+", summable)}
    assert dtypes == SUMMABLE_DTYPES
    known = dtypes | OTHER_DTYPES
    kinds, _, more = ROWS[name]["Dtypes"].partition("; ")
    wanted = known if kinds == "any" else dtypes
    if "inexact" in kinds:
        wanted = {dtype for dtype in wanted if dtype.is_floating_point or dtype.is_complex}
    if "real" in kinds:
        wanted = {dtype for dtype in wanted if not dtype.is_complex}
    wanted |= {getattr(torch, word) for word in more.split(", ") if word}

    def run(group: Any) -> set[torch.dtype]:
        taken = set()
        for dtype in known:
            fn = operator(name, group)
            try:
                fn(torch.zeros(1, 1).to(dtype))
            except TypeError:
                continue
            taken.add(dtype)
        return taken

    assert fddp.loopback(1, run) == [wanted]
