"""Arguments that ranks must agree on: compared when a `GradSync` is built, errors on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fddp
from tests.support.endings import Ending, ending
from tests.support.groups import rank_of, size_of
from tests.support.ranks import Launch
from tests.support.simple_step import grads, params, step

MIB = 1048576


def other(**changes: Any) -> dict[str, Any]:
    tree = {**params(), **changes}
    return {key: leaf for key, leaf in tree.items() if leaf is not Ellipsis}


def image(strided: bool) -> dict[str, Tensor]:
    leaf = torch.zeros(2, 3, 4, 5)
    return {"w": leaf.contiguous(memory_format=torch.channels_last) if strided else leaf}


def plan(**options: Any) -> fddp.BucketPlan:
    return fddp.plan_buckets(params(), **options)


# By name: what rank 0 and what the last rank builds; what the error must hold.
Build = Callable[[Any], fddp.GradSync]
MISMATCHES: dict[str, tuple[Build, Build, tuple[str, ...]]] = {
    "shape": (
        lambda g: fddp.GradSync(params(), group=g),
        lambda g: fddp.GradSync(other(a=torch.ones(4)), group=g),
        ("'a'", "(3,)", "(4,)"),
    ),
    "dtype": (
        lambda g: fddp.GradSync(params(), group=g),
        lambda g: fddp.GradSync(other(a=torch.ones(3).double()), group=g),
        ("'a'", "float32", "float64"),
    ),
    "name": (
        lambda g: fddp.GradSync(params(), group=g),
        lambda g: fddp.GradSync(other(a=..., aa=torch.ones(3)), group=g),
        ("'a'", "'aa'"),
    ),
    "a leaf more": (
        lambda g: fddp.GradSync(params(), group=g),
        lambda g: fddp.GradSync(other(c=torch.ones(1)), group=g),
        ("'c'", "2 leaves", "3"),
    ),
    "a leaf less": (
        lambda g: fddp.GradSync(params(), group=g),
        lambda g: fddp.GradSync(other(b=...), group=g),
        ("'b'", "2 leaves", "1"),
    ),
    "strides": (
        lambda g: fddp.GradSync(image(False), group=g),
        lambda g: fddp.GradSync(image(True), group=g),
        ("'w'", "strides (60, 1, 15, 3)"),
    ),
    "bucket_cap_mb": (
        lambda g: fddp.GradSync(params(), group=g, bucket_cap_mb=25.0),
        lambda g: fddp.GradSync(params(), group=g, bucket_cap_mb=10),
        (str(25 * MIB), str(10 * MIB), "bucket_cap_mb"),
    ),
    "first_bucket_mb": (
        lambda g: fddp.GradSync(params(), group=g),
        lambda g: fddp.GradSync(params(), group=g, first_bucket_mb=2.0),
        (str(MIB), str(2 * MIB), "first_bucket_mb"),
    ),
    "reduce_dtype": (
        lambda g: fddp.GradSync(params(), group=g),
        lambda g: fddp.GradSync(params(), group=g, reduce_dtype=torch.float32),
        ("reduce_dtype", "None", "float32"),
    ),
    "transport": (
        lambda g: fddp.GradSync(params(), group=g),
        lambda g: fddp.GradSync(params(), group=g, transport=transport_of(g)),
        ("transport", "auto"),
    ),
    "sparse": (
        lambda g: fddp.GradSync(params(), group=g),
        lambda g: fddp.GradSync(params(), group=g, sparse=("a",)),
        ("'a'", "sparse"),
    ),
    "select": (
        lambda g: fddp.GradSync(params(), group=g),
        lambda g: fddp.GradSync(params(), group=g, select=lambda path: path != "a"),
        ("'a'", "select"),
    ),
    "plan and parameters": (
        lambda g: fddp.GradSync(plan(), group=g),
        lambda g: fddp.GradSync(params(), group=g),
        ("plan", "True", "False"),
    ),
    "plans of another order": (
        lambda g: fddp.GradSync(plan(order=[0, 1]), group=g),
        lambda g: fddp.GradSync(plan(order=[1, 0]), group=g),
        ("same leaves", "same plan"),
    ),
    "plans of other caps": (
        lambda g: fddp.GradSync(plan(), group=g),
        lambda g: fddp.GradSync(plan(bucket_cap_mb=3.0), group=g),
        (str(3 * MIB),),
    ),
}


def transport_of(group: Any) -> Any:
    return "loopback" if "Loopback" in type(group).__name__ else "c10d"


def build(group: Any, name: str) -> tuple[Ending, Any]:
    first, second, _ = MISMATCHES[name]
    rank = rank_of(group)
    size = size_of(group)
    seen = ending(lambda: (second if rank == size - 1 else first)(group))
    with fddp.GradSync(params(), group=group) as sync:
        return seen, step(sync)[1]


def check_mismatch(runs: list[Any], name: str) -> None:
    last = len(runs) - 1
    assert len({seen.text for seen, _ in runs}) == 1, "the same error on all ranks"
    for seen, after in runs:
        assert seen.kinds[0] == "PlanMismatchError"
        assert "rank 0" in seen.text or "ranks 0" in seen.text
        assert str(last) in seen.text
        for text in MISMATCHES[name][2]:
            assert text in seen.text
        assert ";" in seen.text, "what differs; the way out"
        assert after["a"].tolist() == [2.0] * 3


@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_differing_ranks_are_named_on_every_rank(name: str, world_size: int) -> None:
    check_mismatch(fddp.loopback(world_size, build, name, timeout_s=10.0), name)


def test_ranks_that_differ_on_real_processes(launch: Launch) -> None:
    for pair in zip(*launch(3, build_all), strict=True):
        check_mismatch([run for _, run in pair], pair[0][0])


def build_all(group: Any) -> Any:
    return [(name, build(group, name)) for name in MISMATCHES]


def test_leaves_that_are_not_reduced_may_differ() -> None:
    def run(group: Any) -> Any:
        own = {
            "step": torch.zeros(group.rank, dtype=torch.int64),
            f"count{group.rank}": torch.tensor(1),
        }
        with fddp.GradSync({**params(), **own}, group=group) as sync:
            return sync({**grads(), "step": None, f"count{group.rank}": None})["a"].tolist()

    assert fddp.loopback(2, run) == [[1.0] * 3] * 2


def test_dicts_filled_in_another_order_are_alike() -> None:
    def run(group: Any) -> str:
        items = list(params().items())
        with fddp.GradSync(dict(items[:: 1 if group.rank else -1]), group=group) as sync:
            return sync.plan.digest

    assert len(set(fddp.loopback(2, run))) == 1


# Arguments that make no sense

ARGUMENTS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    **{
        f"{name}={cap!r}": ({name: cap}, "ValueError", (name, repr(cap)))
        for name in ("bucket_cap_mb", "first_bucket_mb")
        for cap in (0, -1.0, math.nan, math.inf, "25", None, True)
    },
    "bucket_cap_mb=[]": ({"bucket_cap_mb": []}, "ValueError", ("bucket_cap_mb", "empty")),
    "bucket_cap_mb=[1, 0]": ({"bucket_cap_mb": [1, 0]}, "ValueError", ("bucket_cap_mb[1]", "0")),
    "sparse=a path that is not there": ({"sparse": ("aa",)}, "ValueError", ("'aa'", "'a'")),
    "sparse=a str": ({"sparse": "a"}, "ValueError", ("collection of paths", "'a'")),
    **{
        f"reduce_dtype={dtype!r}": ({"reduce_dtype": dtype}, "ValueError", (str(dtype), "float64"))
        for dtype in (torch.float16, torch.int32, torch.complex64, "float32", torch.float8_e5m2)
    },
    "transport=a bird": ({"transport": "pigeon"}, "ValueError", ("'pigeon'", "'loopback'")),
    "transport=another": ({"transport": "c10d"}, "ValueError", ("'c10d'", "'loopback'")),
    **{
        f"timeout_s={timeout!r}": (
            {"timeout_s": timeout},
            "ValueError",
            ("timeout_s", repr(timeout)),
        )
        for timeout in (0, -1.0, math.nan, math.inf, "5")
    },
    "select=declines all": ({"select": lambda path: False}, "NoGradientError", ("select",)),
    "select=raises": ({"select": lambda path: 1 / 0}, "ZeroDivisionError", ("division",)),
    "select=not callable": ({"select": "a"}, "TypeError", ()),
}
TREES: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "no float leaf": (
        {"step": torch.tensor(3)},
        "NoGradientError",
        ("int64", "floating or complex"),
    ),
    "an empty tree": ({}, "NoGradientError", ("empty",)),
    "None": (None, "NoGradientError", ()),
    "a str leaf": ({**params(), "name": "net"}, "TypeError", ("'name'", "str")),
    "a float8 leaf": (
        {**params(), "q": torch.zeros(2).to(torch.float8_e4m3fn)},
        "TypeError",
        ("'q'", "float8_e4m3fn", "select="),
    ),
}


@pytest.mark.parametrize("name", [*ARGUMENTS, *TREES])
@pytest.mark.parametrize("on_all", [False, True])
def test_invalid_arguments(name: str, on_all: bool) -> None:
    def run(group: Any) -> tuple[Ending, Any]:
        bad = on_all or group.rank == 1
        options = ARGUMENTS[name][0] if bad and name in ARGUMENTS else {}
        tree = TREES[name][0] if bad and name in TREES else params()
        seen = ending(lambda: fddp.GradSync(tree, group=group, **options))
        with fddp.GradSync(params(), group=group) as sync:
            return seen, step(sync)[1]

    _, kind, texts = {**ARGUMENTS, **TREES}[name]
    for rank, (seen, after) in enumerate(fddp.loopback(2, run, timeout_s=10.0)):
        if on_all or rank == 1:
            assert kind in seen.kinds
            assert f"rank {rank}" in seen.text
        else:
            assert seen.kinds[0] == "PlanMismatchError"
            assert "rank 1 could not build its plan" in seen.text
            assert kind in seen.text
        for text in texts:
            assert text in seen.text
        assert after["a"].tolist() == [2.0] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 3.0},
        {"first_bucket_mb": 3.0},
        {"sparse": ("a",)},
        {"select": lambda p: True},
    ],
)
def test_a_plan_takes_no_options_of_planning(options: dict[str, Any]) -> None:
    def run(group: Any) -> Ending:
        return ending(lambda: fddp.GradSync(plan(), group=group, **options))

    for seen in fddp.loopback(2, run):
        assert "ValueError" in seen.kinds
        assert "plan_buckets" in seen.text


@pytest.mark.parametrize("group", ["world", 3, object()])
def test_something_that_is_no_group(group: Any) -> None:
    seen = ending(lambda: fddp.GradSync(params(), group=group))
    assert {"FddpError", "ValueError", "TypeError"} & set(seen.kinds)
    assert seen.text


def test_missing_group_is_refused() -> None:
    seen = ending(lambda: fddp.GradSync(params()))
    assert seen.kinds[0] == "FddpError"
    assert "init_process_group" in seen.text
    assert "fddp.loopback" in seen.text


def test_a_rank_that_does_not_come() -> None:
    def run(group: Any) -> Ending:
        if group.rank == 1:
            time.sleep(0.6)
            return Ending((), "", {})
        return ending(lambda: fddp.GradSync(params(), group=group, timeout_s=0.2))

    seen = fddp.loopback(2, run)[0]
    assert seen.kinds[0] == "SyncTimeoutError"
    assert "0.2" in seen.text
    assert "rank 1" in seen.text


def test_a_plan_without_buckets() -> None:
    plan = fddp.BucketPlan((fddp.LeafSpec("w", (3,), "float32"),), (), (1024,), ())
    with pytest.raises(fddp.NoGradientError, match="1 leaf and no bucket"):
        fddp.loopback(1, lambda group: fddp.GradSync(plan, group=group))
