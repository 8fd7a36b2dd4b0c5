"""State that changes with the number of ranks."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from torch import Generator, Tensor

from fddp.errors import ReplicationError
from fddp.extend import tree_flatten
from fddp.testing.replication.allowed import GROWTH
from fddp.testing.replication.leaves import input_of, leaves_of
from fddp.testing.replication.observers import is_reduction, is_sum
from fddp.testing.replication.runs import Outcome, Program
from fddp.testing.replication.values import growth, is_same


def check_growth(checked: Program, usual: Outcome) -> None:
    """Check that no state changes with the number of ranks if all send the same.

    A run on more ranks, whose number the step may read, shows sums; another with larger sums shows
    those that the step does not divide by that number. State that changes in both is a fault, and
    so is an update that is only smaller on more ranks: a mean that was divided. One that is only
    larger is meant, as a learning rate times the number of ranks. State that influences nothing
    else, such as a count, may be a sum.

    Args:
        checked: the step.
        usual: its usual run.
    """
    __tracebackhide__ = True
    replicated, varying = checked.inputs()
    # Each rank has another part of what is scattered, or broadcast by its owner.
    has_parts = any(
        "reduce_scatter" in own.form or re.search("from rank [^0]", own.form)
        for own in usual.collectives
    )
    if has_parts or any(isinstance(leaf, Generator) for leaf in tree_flatten(varying)[0]):
        return
    on_more = checked._replace(ranks=2 * checked.ranks).run(frozenset())
    if on_more.error is not None:
        return  # the step has a mesh of its own
    larger = checked.run(frozenset(), sums=2)
    before = [
        _State(_shape(path, leaf), path, leaf)
        for name, value in (replicated | varying).items()
        for path, leaf in leaves_of(name, value)
    ]
    found = next(
        (
            path
            for path, value in usual.values.items()
            if input_of(path) in replicated or _shape(path, value) in {s.shape for s in before}
            if growth(value, on_more.values.get(path)) != 1.0
            if growth(value, larger.values.get(path)) != 1.0
            or (_sends_the_same(usual, on_more) and _shrinks(path, usual, on_more, before))
            if _is_read(checked, usual, path)
        ),
        None,
    )
    if found is None:
        return
    sums = [
        own
        for own, theirs in zip(usual.collectives, on_more.collectives, strict=False)
        if is_reduction(own) and growth(own.result, theirs.result) != 1.0 and is_sum(own.text)
    ]
    operators = (own for own in usual.collectives if is_reduction(own) and "bucket" not in own.text)
    sums = sums or [*operators][:1]
    what = f" through {sums[0].text}" if sums else ""
    is_mean = sums and not is_sum(sums[0].text)
    way = "psum for pmean" if is_mean else "pmean for psum"
    raise ReplicationError(
        f"{found} changes with the number of ranks, although all send the same{what}; write {way} "
        f"there, or divide by a sum over ranks. If it is meant, as by an objective that is a sum "
        f"or by counts of all ranks, which check_equivalence can tell, pass allow=[{GROWTH!r}]",
        path=found,
        line=sums[0].called_at if sums else "",
    )


class _State(NamedTuple):
    """A leaf of the inputs."""

    shape: Any
    path: str
    leaf: Any


def _sends_the_same(usual: Outcome, on_more: Outcome) -> bool:
    """Return True if the first reduction is an operator's, of values that do not depend on the
    number of ranks."""
    pairs = zip(usual.collectives, on_more.collectives, strict=False)
    own, theirs = next((pair for pair in pairs if is_reduction(pair[0])), (None, None))
    if own is None or theirs is None or own.text.startswith("bucket"):
        return False
    return is_same(own.sent, theirs.sent)


def _shrinks(path: str, usual: Outcome, on_more: Outcome, before: list[_State]) -> bool:
    """Return True if more ranks change a leaf less."""
    value, after = usual.values[path].double(), on_more.values[path].double()
    own = next((s.leaf for s in before if _key(s.path) == _key(path)), None)
    if isinstance(own, Tensor) and own.shape == value.shape:
        value, after = value - own.detach().cpu(), after - own.detach().cpu()
    return bool(after.norm() < value.norm())


def _is_read(checked: Program, usual: Outcome, path: str) -> bool:
    """Return True if a leaf of a tree influences a collective or another leaf; of modules,
    optimizers and what else is no input, True."""
    for name, tree in checked.replicated.items():
        leaves, treedef = tree_flatten(tree)
        for number, own in enumerate(treedef.paths):
            if isinstance(leaves[number], Tensor) and _key(path).endswith(own) and own:
                leaves[number] = leaves[number].detach() * 1.5 + 1
                changed = checked.replicated | {name: treedef.unflatten(leaves)}
                run = checked._replace(replicated=changed).run(frozenset())
                return run.error is not None or _influences(usual, run, own)
    return True


def _influences(usual: Outcome, changed: Outcome, own: str) -> bool:
    pairs = zip(usual.collectives, changed.collectives, strict=False)
    sent = [(one.sent, other.sent) for one, other in pairs if one.sent.is_floating_point()]
    return any(not is_same(one, other) for one, other in sent) or any(
        not is_same(value, changed.values.get(path))
        for path, value in usual.values.items()
        if not _key(path).endswith(own)
    )


def _key(path: str) -> str:
    """Path of a leaf within its input or result."""
    found = re.search(r"\['(.*)'\]$", path)
    return found[1] if found else ""


def _shape(path: str, leaf: Any) -> Any:
    """Shape of a leaf; of one element also the last key of its path."""
    shape = getattr(leaf, "shape", ())
    key = re.search(r"(\w+)'\]$", path)
    return shape if math.prod(shape) > 1 else (shape, key and key[1])
