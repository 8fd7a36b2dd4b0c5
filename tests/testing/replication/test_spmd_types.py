"""Verdicts of `check_replication` on random programs, beside those of the package spmd-types, which
infers kinds without values."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fddp
from fddp.testing import check_replication

PROGRAMS, LONGEST = 1000, 8
BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}
UNARY = {"tanh": torch.tanh, "neg": torch.neg}


class Statement(NamedTuple):
    """An assignment to the next variable. Variables 0 and 1 are the inputs, replicated and
    varying."""

    op: str
    left: int
    right: int


def drawn(seed: int) -> list[Statement]:
    draw = random.Random(seed)
    count = draw.randint(1, LONGEST)
    names = [*BINARY, *UNARY, "mean"]
    return [
        Statement(draw.choice(names), *draw.choices(range(2 + number), k=2))
        for number in range(count)
    ]


def run(program: list[Statement], inputs: tuple[Any, Any], mean: Any) -> list[Any]:
    values = list(inputs)
    for op, left, right in program:
        if op == "mean":
            values.append(mean(values[left]))
        elif op in UNARY:
            values.append(UNARY[op](values[left]))
        else:
            values.append(BINARY[op](values[left], values[right]))
    return values


INPUTS = torch.tensor([0.3, -0.7, 1.1]), torch.tensor([0.9, 0.2, -0.4])


def accepts(program: list[Statement]) -> bool:
    def step(replicated, varying):
        return run(program, (replicated, varying), fddp.pmean)[-1]

    try:
        check_replication(step, replicated=INPUTS[:1], varying=INPUTS[1:])
    except fddp.ReplicationError:
        return False
    return True


def accepts_by_types(spmd: Any, mesh: Any, program: list[Statement]) -> bool:
    group = mesh.get_group("dp")

    def mean(x: Any) -> Any:
        if spmd.get_axis_local_type(x, group) is spmd.V:
            x = spmd.reinterpret(x, group, src=spmd.V, dst=spmd.P)
        return spmd.all_reduce(x, group, src=spmd.P, dst=spmd.R) / 2  # an error if x is replicated

    inputs = INPUTS[0].clone(), INPUTS[1].clone()
    with spmd.set_current_mesh(mesh), spmd.checker.typecheck():
        spmd.assert_type(inputs[0], {group: spmd.R})
        spmd.assert_type(inputs[1], {group: spmd.V})
        try:
            result = run(program, inputs, mean)[-1]
        except spmd.SpmdTypeError:
            return False
        return bool(spmd.get_axis_local_type(result, group) is spmd.R)


def cancels(program: list[Statement]) -> bool:
    """Return True if a value does not depend on the varying values of which it is made, as `v - v`,
    or is zero, of which a second mean is no error. Types can't see that."""
    means: list[torch.Tensor] = []

    def record(x: torch.Tensor) -> torch.Tensor:
        means.append(x)
        return x

    values = run(program, INPUTS, record)
    replayed = iter(means)
    others = run(program, (INPUTS[0], INPUTS[1] * 0.6 + 0.1), lambda _: next(replayed))
    for statement, one, two in zip(program, values[2:], others[2:], strict=True):
        operands = {statement.left} if statement.op in UNARY else {statement.left, statement.right}
        vary = any(not torch.equal(values[k], others[k]) for k in operands)
        if statement.op != "mean" and (not one.any() or (vary and torch.equal(one, two))):
            return True
    return False


@pytest.fixture
def spmd(tmp_path: Path) -> Iterator[Any]:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    installed = subprocess.run([*pip, tmp_path, "spmd-types"], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"spmd-types can't be installed: {installed.stderr[-300:]}")
    sys.path.append(str(tmp_path))
    importlib.import_module("spmd_types.checker")
    yield importlib.import_module("spmd_types")
    sys.path.remove(str(tmp_path))


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group(backend="fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_verdicts_are_those_of_types(spmd: Any, mesh: Any) -> None:
    programs = [drawn(seed) for seed in range(PROGRAMS)]
    verdicts = [(accepts(p), accepts_by_types(spmd, mesh, p)) for p in programs]
    other = [p for p, (own, theirs) in zip(programs, verdicts, strict=True) if own != theirs]
    unexplained = [program for program in other if not cancels(program)]
    print(f"{sum(own for own, _ in verdicts)} accepted, {len(other)} by one alone")
    assert 100 < sum(own for own, _ in verdicts) < PROGRAMS - 100
    assert not unexplained, unexplained[:5]
