"""Steps on real ranks, each a thread with inputs of its own: the verdicts that those of
checks are compared with."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import numpy as np
import torch

import fddp
from fddp.extend import tree_flatten
from fddp.transport.loopback import DEFAULT_GROUP, LoopbackGroup
from tests.testing.replication.loops.inputs import Loop

Values = dict[str, Any]
Step = Callable[..., Any]

EXTREMES = (1e6, float("nan"), 0.0)
LEAVE_RANKS_WAITING = (
    *(fddp.errors.DesyncError, fddp.errors.RankLostError, fddp.errors.SyncTimeoutError),
    fddp.errors.PeerError,
)
_TIMEOUT_S = 20.0
_SHARES = {2: (3, 5), 3: (2, 4, 2)}


class After(NamedTuple):
    """Numbers after a step, by path.

    Attributes:
        kept: of the replicated inputs and of the results in their place, equal on all ranks.
        more: of other results, such as the loss of each rank.
    """

    kept: Values
    more: Values


class Truth(NamedTuple):
    """Behaviour of a step on two ranks.

    Attributes:
        verdict: "hangs" if ranks wait for each other, "parts" if replicas differ afterwards,
            "changes" if results are others than those of another step, "same" if not, and "raises"
            if it can't run.
        where: the error, or the path of a leaf.
    """

    verdict: str
    where: str = ""

    @property
    def is_wrong(self) -> bool:
        """True if the step does harm."""
        return self.verdict in ("hangs", "parts", "changes")


def run(fn: Step, inputs: Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]]) -> list[After]:
    """Run a step on ranks that are threads; return the numbers of each rank.

    Args:
        fn: the step.
        inputs: replicated and varying ones, for each rank.
    """
    takes_group = "group" in inspect.signature(fn).parameters

    def one_rank(group: LoopbackGroup) -> After:
        DEFAULT_GROUP.set(group)  # in the context of this thread
        replicated, varying = copies[group.rank]
        result = fn(*replicated, *varying, **({"group": group} if takes_group else {}))
        return after(replicated, result)

    copies = [copy.deepcopy(own) for own in inputs]
    torch.manual_seed(0)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return fddp.loopback(len(copies), one_rank, timeout_s=_TIMEOUT_S)


def after(replicated: Sequence[Any], result: Any) -> After:
    """Numbers of the replicated inputs after a step, and of its results."""
    trees = [value for value in replicated if not hasattr(value, "state_dict")]
    is_tuple = isinstance(result, tuple) and not hasattr(result, "_fields")
    results = list(result) if is_tuple and replicated else [result]
    count = len(trees) if replicated and (is_tuple or not trees) else len(results)
    named = {f"state {n}": value for n, value in enumerate(replicated)}
    named |= {f"result {n}": value for n, value in enumerate(results)}
    found = {name: {f"{name} {p}": leaf for p, leaf in numbers_of(v)} for name, v in named.items()}
    more = [found.pop(f"result {n}") for n in range(count, len(results))]
    return After(_joined(found.values()), _joined(more))


def _joined(parts: Iterable[Values]) -> Values:
    return {path: leaf for part in parts for path, leaf in part.items()}


def numbers_of(value: Any) -> list[tuple[str, Any]]:
    """Paths and leaves of a tree, module, optimizer or generator, as arrays."""
    if isinstance(value, torch.nn.Module):
        value = dict(value.named_parameters())
    elif hasattr(value, "state_dict"):
        value = value.state_dict()
    leaves, treedef = tree_flatten(value)
    return [(p, array_of(leaf)) for p, leaf in zip(treedef.paths, leaves, strict=True)]


def array_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Generator):
        leaf = leaf.get_state()
    if isinstance(leaf, torch.Tensor):
        dense = leaf.detach().to_dense() if leaf.layout is not torch.strided else leaf.detach()
        return (dense.float() if dense.dtype == torch.bfloat16 else dense).clone().numpy()
    return np.array(leaf) if hasattr(leaf, "__array__") or isinstance(leaf, int | float) else leaf


def differing(values: Values, others: Values, tolerance: float = 0.0) -> str:
    """Path of the first leaf that differs by more than a share of its largest element, in bits if
    that is 0; "" if there is none."""
    for path in [*values, *(path for path in others if path not in values)]:
        one, two = values.get(path), others.get(path)
        if not isinstance(one, np.ndarray) or not isinstance(two, np.ndarray):
            same = one is two or bool(one == two)
        elif one.shape != two.shape or not np.issubdtype(one.dtype, np.inexact):
            same = np.array_equal(one, two)
        else:
            own = max(tolerance, 1e-5) if tolerance and one.dtype != np.float64 else tolerance
            most = np.nan_to_num(np.abs(one)).max(initial=0.0)
            same = np.allclose(one, two, rtol=0.0, atol=own * max(most, 1e-3), equal_nan=True)
        if not same:
            return path
    return ""


# On two ranks


def truth_of(loop: Loop, original: Loop | None = None) -> Truth:
    """Run a loop on two ranks, with usual and with extreme inputs of the second.

    Args:
        loop: the loop.
        original: correct loop with the same inputs, whose results are the right ones.
    """
    if loop.is_forward:
        return Truth("unknown", "threads share the levels of forward mode")
    usual = _on_two_ranks(loop)
    if isinstance(usual, Truth):
        return usual
    for factor in EXTREMES:
        extreme = _on_two_ranks(loop, factor)
        if isinstance(extreme, Truth) and extreme.is_wrong:  # such inputs may be invalid
            return extreme._replace(where=f"{extreme.where}, inputs times {factor}")
    if original is not None:
        right, again = _on_two_ranks(original), _on_two_ranks(original)
        assert not isinstance(right, Truth), right
        assert not isinstance(again, Truth), again
        path = differing(usual, right, 1e-9)
        if path and not differing(right, again):  # random numbers are others each time
            return Truth("changes", path)
    return Truth("same")


def _on_two_ranks(loop: Loop, factor: float | None = None) -> Values | Truth:
    """Values of rank 0, or the verdict if there is one."""
    for is_double in (True, False):  # some steps make tensors in float32
        try:
            found = run(loop.fn, inputs_of(loop, factor, is_double))
        except LEAVE_RANKS_WAITING as error:
            return Truth("hangs", str(error)[:200])
        except Exception as error:
            raised = Truth("raises", f"{type(error).__name__}: {error}"[:200])
            continue
        path = differing(*(own.kept for own in found))
        return Truth("parts", path) if path else found[0].kept
    return raised


def inputs_of(
    loop: Loop, factor: float | None = None, is_double: bool = True
) -> list[tuple[Any, Any]]:
    """Inputs of two ranks.

    Args:
        loop: the loop.
        factor: on the floating inputs of rank 1; None for others than those of rank 0.
        is_double: True for float64 where they are floating.
    """
    varying = []
    for rank in range(2):
        own = [v(rank) if inspect.isroutine(v) else v for v in loop.varying]
        is_given = [inspect.isroutine(v) for v in loop.varying]
        for n, value in enumerate(own):
            if rank == 1 and factor is not None:
                own[n] = _mapped(value, lambda leaf: leaf * factor if _floats(leaf) else leaf)
            elif rank == 1 and not is_given[n]:
                own[n] = _mapped(value, _other)
        varying.append(tuple(own))
    inputs = [copy.deepcopy((loop.replicated, own)) for own in varying]
    return in_double(inputs) if is_double else inputs


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    return fddp.tree_map(change, copy.deepcopy(value))


def _floats(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.is_floating_point()
    return isinstance(leaf, float) or (hasattr(leaf, "dtype") and leaf.dtype.kind == "f")


def _other(leaf: Any) -> Any:
    """Leaf of another rank in the place of one: rows in another order, and smaller."""
    if isinstance(leaf, torch.Generator):
        return leaf.manual_seed(leaf.initial_seed() + 1)
    if isinstance(leaf, torch.Tensor) and leaf.dim():
        leaf = leaf[torch.arange(len(leaf)) * 3 % len(leaf) if len(leaf) > 4 else slice(None)]
        return 0.7 * leaf.flip(0) if leaf.is_floating_point() else leaf
    return 0.7 * leaf if _floats(leaf) else leaf


def in_double(value: Any) -> Any:
    """Inputs in float64, where torch holds them in float32; modules are changed in place."""

    def double(leaf: Any) -> Any:
        if isinstance(leaf, torch.nn.Module):
            return leaf.double()
        is_single = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
        return leaf.double() if is_single else leaf

    return fddp.tree_map(double, value)


# Beside one device


def unlike_one_device(
    fn: Step, state: tuple[Any, ...], batch: tuple[Any, ...], ranks: int, is_even: bool = False
) -> str:
    """Compare ranks that have parts of a batch with one that has all of it.

    Returns:
        The path of a leaf that differs with the ratio of its change, or the error; "" if there is
        none.
    """
    parts = [tuple(part_of(tree, rank, ranks, is_even) for tree in batch) for rank in range(ranks)]
    ((before, whole),) = [in_double(copy.deepcopy((state, batch)))]
    one = run(fn, [(before, whole)])[0]
    try:
        several = run(fn, [in_double(copy.deepcopy((state, part))) for part in parts])
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    equal = {
        path: value
        for path, value in several[0].more.items()
        if not any(differing({path: value}, {path: own.more[path]}, 1e-9) for own in several)
    }
    found = [differing(one.kept, own.kept, 1e-7) for own in several]
    found.append(differing({path: one.more[path] for path in equal}, equal, 1e-7))
    return next(filter(None, found), "")


def part_of(tree: Any, rank: int, ranks: int, is_even: bool) -> Any:
    """Rows of a rank. Uneven parts are 3:5 and 2:4:2."""
    shares = (1,) * ranks if is_even else _SHARES[ranks]
    before, until = sum(shares[:rank]) / sum(shares), sum(shares[: rank + 1]) / sum(shares)

    def rows(leaf: Any) -> Any:
        count = len(leaf)
        return leaf[round(before * count) : round(until * count)]

    return fddp.tree_map(rows, tree)
