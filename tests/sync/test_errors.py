"""Bad input: a complete error on every rank, after which the group is still usable."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fddp
from tests.support.backward_calls import call_in_backward
from tests.support.collectives import record_works
from tests.support.endings import BoomError, Ending, ending
from tests.support.models import same_bits
from tests.support.ranks import Launch
from tests.support.simple_step import grads, loss_fn, params, step

SMALL = {"bucket_cap_mb": 1e-5, "first_bucket_mb": 1e-5}


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("an error without a text")


def raising(error: BaseException) -> Callable[..., Any]:
    def fails(*args: Any) -> Any:
        raise error

    return fails


def fail_in_backward() -> None:
    raise BoomError(7, "in backward")


def early_failure(p: dict[str, Tensor]) -> Tensor:
    return call_in_backward(loss_fn(p), fail_in_backward)


def late_failure(p: dict[str, Tensor]) -> Tensor:
    """The gradient of b arrives first, then backward fails on the way to a."""
    a = call_in_backward(p["a"] * 1.0, fail_in_backward)
    return a.sum() + (p["b"] ** 2).sum()


def inner_sync_fails(sync: fddp.GradSync) -> Callable[..., Any]:
    """An error of fddp's own, raised by the caller's code."""
    return raising(fddp.TreeMismatchError("of my own making"))


class Case(NamedTuple):
    """A mistake in one step: what is called, the error, and what its text must hold."""

    call: Callable[[fddp.GradSync], Any]
    kind: str
    texts: tuple[str, ...]


PLAN_HAS_A = ("'a'", "float32", "(3,)")
TREES = {
    "a wrong shape": (grads(a=torch.ones(4)), (*PLAN_HAS_A, "(4,)")),
    "a wrong dtype": (grads(a=torch.ones(3).double()), (*PLAN_HAS_A, "float64")),
    "a missing leaf": (grads(a=...), ("missing", "'a'")),
    "a leaf too many": (grads(c=torch.ones(1)), ("unexpected", "'c'")),
    "another container": (grads(a=[torch.ones(3)]), ("'a'", "'a.0'")),
    "a number": (grads(a=3.0), ("'a'", "float", "tensor or None")),
    "a meta tensor": (grads(a=torch.ones(3, device="meta")), ("'a'", "meta", "cpu")),
    "nothing": (None, ("missing", "'a'")),
    "an empty tree": ({}, ("missing", "'a'")),
    "a bare tensor": (torch.ones(3), ("missing", "'a'")),
}

CASES: dict[str, Case] = {
    **{
        f"gradients with {name}": Case(lambda s, t=tree: s(t), "TreeMismatchError", texts)
        for name, (tree, texts) in TREES.items()
    },
    **{
        f"parameters with {name}": Case(
            lambda s, t=tree: s.value_and_grad(loss_fn)(t), "TreeMismatchError", texts
        )
        for name, (tree, texts) in TREES.items()
        if name != "a meta tensor"
    },
    **{
        f"accumulated gradients with {name}": Case(
            lambda s, t=tree: s.value_and_grad(loss_fn)(params(), accumulated=(t, 1.0)),
            "TreeMismatchError",
            texts,
        )
        for name, (tree, texts) in TREES.items()
        if name != "a meta tensor"
    },
    "parameters with a None": Case(
        lambda s: s.value_and_grad(loss_fn)({**params(), "a": None}),
        "TreeMismatchError",
        ("'a'", "None"),
    ),
    **{
        f"a weight of {weight!r}": Case(
            lambda s, w=weight: s(grads(), weight=w), "WeightError", (repr(weight),)
        )
        for weight in (-1.0, math.nan, math.inf, -math.inf, "2", "heavy", None, 1j, [1.0])
    },
    **{
        f"a weight_fn that gives {weight!r}": Case(
            lambda s, w=weight: step(s, weight_fn=lambda p: w), "WeightError", (repr(weight),)
        )
        for weight in (-0.5, math.nan, math.inf, "2", None)
    },
    "accumulated with a negative weight": Case(
        lambda s: s.value_and_grad(loss_fn)(params(), accumulated=(grads(), -3.0)),
        "WeightError",
        ("-3.0",),
    ),
    "a weight_fn that raises": Case(
        lambda s: step(s, weight_fn=raising(BoomError(1, "here"))), "BoomError", ("boom 1 here",)
    ),
    "a loss of two numbers": Case(
        lambda s: step(s, lambda p: p["b"] * 2), "LossError", ("(2,)", "float32", "mean()")
    ),
    "a complex loss": Case(
        lambda s: step(s, lambda p: p["b"].sum() * 1j), "LossError", ("complex64", "real scalar")
    ),
    "an integer loss": Case(
        lambda s: step(s, lambda p: torch.tensor(3)), "LossError", ("int64", "real scalar")
    ),
    "a loss that is a number": Case(
        lambda s: step(s, lambda p: 3.0), "LossError", ("float", "tensor")
    ),
    "a pair without has_aux": Case(
        lambda s: step(s, lambda p: (loss_fn(p), 1)), "LossError", ("tuple", "pass has_aux=True")
    ),
    "has_aux without a pair": Case(
        lambda s: step(s, loss_fn, has_aux=True), "LossError", ("has_aux", "Tensor")
    ),
    "an exception in the loss function": Case(
        lambda s: step(s, raising(BoomError(2, "there"))), "BoomError", ("boom 2 there",)
    ),
    "an exception in backward before any gradient": Case(
        lambda s: step(s, early_failure), "BoomError", ("boom 7 in backward",)
    ),
    "an exception in backward after a gradient": Case(
        lambda s: step(s, late_failure), "BoomError", ("boom 7 in backward",)
    ),
    "an interrupt": Case(
        lambda s: step(s, raising(KeyboardInterrupt("by hand"))), "KeyboardInterrupt", ("by hand",)
    ),
    "a text that is no unicode": Case(
        lambda s: step(s, raising(FileNotFoundError(2, "no file", "caf\udce9"))),
        "FileNotFoundError",
        ("no file", "caf"),
    ),
    "a text of several lines and a megabyte": Case(
        lambda s: step(s, raising(BoomError(4, "one\n\ntwo" + "x" * 10**6))),
        "BoomError",
        ("boom 4 one\n\ntwoxxx",),
    ),
    "an error without a text": Case(lambda s: step(s, raising(MuteError())), "MuteError", ()),
    "an error of fddp's from the loss function": Case(
        lambda s: step(s, inner_sync_fails(s)), "TreeMismatchError", ("of my own making",)
    ),
    "reduce_ of expanded gradients": Case(
        lambda s: s.reduce_(grads(a=torch.ones(1).expand(3))),
        "TreeMismatchError",
        ("'a'", "(0,)", "sync(grads)"),
    ),
    "reduce_ of one tensor twice": Case(
        lambda s: s.reduce_({"a": (t := torch.ones(3)), "b": t[:2], "step": None}),
        "TreeMismatchError",
        ("'a'", "'b'", "share memory"),
    ),
}


def make_the_mistake(group: Any, name: str, culprits: tuple[int, ...], warm: bool) -> Any:
    """One step with a mistake on some ranks, then steps that must be right."""
    p = params()
    before = {key: leaf.clone() for key, leaf in p.items()}
    with fddp.GradSync(p, group=group, **SMALL, timeout_s=20.0) as sync:
        good = lambda: step(sync)  # noqa: E731
        if warm:
            good()
        seen = ending(lambda: CASES[name].call(sync)) if sync.rank in culprits else ending(good)
        after = [step(sync)[1], sync(grads(a=torch.full((3,), float(sync.rank)))), step(sync)[1]]
        number = sync.rank
    with fddp.GradSync(p, group=group, **SMALL, timeout_s=20.0) as sync:
        after.append(step(sync)[1])
    assert same_bits([p, before])
    return number, seen, after


def check_mistake(runs: list[Any], name: str, culprits: tuple[int, ...], number: int) -> None:
    case = CASES[name]
    for rank, seen, after in runs:
        if rank in culprits:
            assert case.kind in seen.kinds, seen
            for text in case.texts:
                assert text in seen.text
            if "FddpError" in seen.kinds:
                assert seen.text.startswith(f"rank {rank} at step {number}: ")
        else:
            assert seen.kinds[0] == "PeerError"
            assert set(seen.failures) == set(culprits)
            for culprit in culprits:
                assert f"rank {culprit} failed at step {number}: " in seen.text
                assert case.kind in seen.failures[culprit]
                for text in case.texts:
                    assert text.encode(errors="ignore") in seen.text.encode(errors="ignore")
        first, tree, second, anew = after
        for result in (first, second, anew):
            assert result["a"].tolist() == [2.0] * 3
            assert result["b"].tolist() == [4.0] * 2
        assert tree["a"].tolist() == [sum(range(len(runs))) / len(runs)] * 3


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("culprits", [(1,), (0, 2), (0, 1, 2)], ids=["one", "two", "all"])
def test_a_mistake_is_an_error_on_every_rank(name: str, culprits: tuple[int, ...]) -> None:
    warm = len(culprits) == 1
    runs = fddp.loopback(3, make_the_mistake, name, culprits, warm, timeout_s=10.0)
    check_mistake(runs, name, culprits, int(warm))


def test_mistakes_are_errors_on_real_processes(launch: Launch) -> None:
    runs = launch(2, many_mistakes, list(CASES)[:: 4 if launch.name == "c10d" else 16])
    for mistakes in zip(*runs, strict=True):
        name = mistakes[0][0]
        check_mistake([run for _, run in mistakes], name, (1,), 0)


def many_mistakes(group: Any, names: list[str]) -> Any:
    return [(name, make_the_mistake(group, name, (1,), False)) for name in names]


def test_different_mistakes_are_all_reported() -> None:
    def run(group: Any) -> Ending:
        with fddp.GradSync(params(), group=group) as sync:
            calls = [
                lambda: sync(grads(), weight=-1.0),
                lambda: step(sync),
                lambda: step(sync, raising(BoomError(5, "on rank 2"))),
            ]
            return ending(calls[group.rank])

    first, second, third = fddp.loopback(3, run)
    assert first.kinds[0] == "WeightError"
    assert third.kinds[0] == "BoomError"
    assert second.kinds[0] == "PeerError"
    assert set(second.failures) == {0, 2}
    assert second.failures[0].startswith("WeightError: a weight must be ")
    assert second.failures[0].endswith(", got -1.0")
    assert second.failures[2] == "BoomError: boom 5 on rank 2"
    assert "the group is in step and can go on" in second.text


def test_a_total_weight_of_zero_is_an_error_on_every_rank(launch: Launch) -> None:
    for *ends, after in launch(2, no_weight_at_all):
        for seen in ends:
            assert seen.kinds[0] == "WeightError"
            assert re.search(r"step \d: the total weight over 2 ranks is 0", seen.text)
            assert "at least one rank" in seen.text
        assert after["a"].tolist() == [2.0] * 3


def no_weight_at_all(group: Any) -> Any:
    with fddp.GradSync(params(), group=group) as sync:
        tree = ending(lambda: sync(grads(), weight=0.0))
        stepped = ending(lambda: step(sync, weight_fn=lambda p: 0))
        exhausted = ending(lambda: step(sync, loss_fn, fddp.EXHAUSTED))
        return tree, stepped, exhausted, step(sync)[1]


# Out of step


def test_errors_are_raised_once_all_collectives_have_finished() -> None:
    """The memory of a bucket is used again in the next step."""

    def run(group: Any) -> list[str]:
        caps = {"bucket_cap_mb": 1e-6, "first_bucket_mb": 1e-6}
        with fddp.GradSync(params(), group=group, **caps) as sync:
            started, awaited = record_works(sync)
            with pytest.raises((BoomError, fddp.PeerError)):
                sync.value_and_grad(late_failure if group.rank else loss_fn)(params())
            assert len(started) == 3, "two buckets, and the exchange of what went wrong"
            return [text for text, work in started if not any(work is other for other in awaited)]

    assert fddp.loopback(2, run) == [[], []]


def test_one_step_too_many_on_one_rank_is_a_named_error() -> None:
    """Rank 0 meets rank 1's second step of one GradSync with its first of another call order."""

    def run(group: Any) -> Ending:
        with fddp.GradSync(params(), group=group, timeout_s=2.0) as sync:
            step(sync)
            if group.rank:
                return ending(lambda: step(sync))
        return ending(lambda: None)

    first, second = fddp.loopback(2, run)
    assert first.kinds[0] == "no error"
    assert second.kinds[0] == "RankLostError"
    assert "step 1" in second.text


def test_rank_that_skipped_a_step_is_distinguished() -> None:
    def run(group: Any) -> tuple[Ending, Any]:
        with fddp.GradSync(params(), group=group) as sync:
            if group.rank:
                sync._engine.step += 1  # as after a step of a GradSync restored from elsewhere
            seen = ending(lambda: step(sync))
        with fddp.GradSync(params(), group=group) as sync:
            return seen, step(sync)[1]

    for seen, after in fddp.loopback(2, run):
        assert seen.kinds[0] == "DesyncError"
        assert "step 0" in seen.text
        assert "step 1" in seen.text
        assert "fddp.uneven" in seen.text
        assert after["a"].tolist() == [2.0] * 3


# After the end


def test_use_after_close_is_an_error() -> None:
    """It may be closed twice, and an error in the body of `with` closes it."""

    def run(group: Any) -> list[Ending]:
        sync = fddp.GradSync(params(), group=group)
        wrapped = sync.value_and_grad(loss_fn)
        sync(grads())
        with pytest.raises(BoomError), sync:
            raise BoomError(6, "in the body")
        sync.close()
        calls = (lambda: sync(grads()), lambda: sync.reduce_(grads()), lambda: wrapped(params()))
        return [ending(call) for call in calls]

    for ends in fddp.loopback(2, run):
        for seen in ends:
            assert seen.kinds[0] == "ClosedError"
            assert "close() was called" in seen.text
            assert "build a new one" in seen.text


@pytest.mark.parametrize("before", [None, torch.zeros(3, dtype=torch.int64)])
def test_a_leaf_that_becomes_differentiable_is_noticed(before: Any) -> None:
    tree = {"w": torch.zeros(2), "b": before}

    def run(group: Any) -> None:
        with fddp.GradSync(tree, group=group) as sync:
            now = {"w": torch.ones(2), "b": torch.ones(3)}
            with pytest.raises(
                fddp.TreeMismatchError, match="leaf 'b' of the gradients is float32"
            ):
                sync(now)
            with pytest.raises(fddp.TreeMismatchError, match="leaf 'b' of the parameters"):
                sync.value_and_grad(lambda p: p["w"].sum() + p["b"].sum())(now)
            assert sync({"w": torch.ones(2), "b": None})["w"].tolist() == [1.0, 1.0]

    fddp.loopback(2, run)


def test_an_error_of_a_step_within_a_step_is_placed_once() -> None:
    def run(group: Any) -> str:
        with (
            fddp.GradSync(params(), group=group) as inner,
            fddp.GradSync(params(), group=group) as outer,
        ):
            step = outer.value_and_grad(lambda p: loss_fn(inner(fddp.tree_map(torch.neg, p))))
            with pytest.raises(fddp.TransformError) as caught:
                step(params())
            return str(caught.value)

    (text,) = fddp.loopback(1, run)
    assert re.match(r"rank 0 at step 0: (?!rank)", text)
