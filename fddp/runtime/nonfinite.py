"""Policies for steps with non-finite gradients, and the error with the counts of all ranks.

Packing detects non-finite gradients, and the control word reports them. Non-finite sums are
detected in the results. Only under the policy "raise", and only after a detection, are non-finite
numbers counted by leaf and the counts exchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fddp.core.protocol.messages import MappingOf, Schema
from fddp.core.text import leaf_text
from fddp.errors import NonFiniteError

Policy = Literal["propagate", "skip", "raise"]

ResultKind = Literal["replicated", "sharded", "own"]
"""Results of ranks: the same on all, disjoint shards, or different results on each."""

MOST_NAMED = 100
"""Maximum number of leaves that a rank reports, for gradients and for sums."""

COUNTS: Schema = (MappingOf((int, int)), MappingOf((int, int)), int, MappingOf((int, int)))
"""Schema of `NonFiniteCounts.to_json`."""

_MOST_WRITTEN = 3  # leaves in the error text, for each rank


class StopStepError(Exception):
    """Ends a step because of a non-finite number, on all ranks. Callers never see it."""


class Count(NamedTuple):
    """Numbers of NaN and infinite elements of a leaf."""

    nan: int
    inf: int

    def __str__(self) -> str:
        kinds = (self.nan, "NaN", "NaN"), (self.inf, "infinity", "infinities")
        return " and ".join(f"{n} {one if n == 1 else many}" for n, one, many in kinds if n)


class NonFiniteCounts(NamedTuple):
    """Non-finite numbers that one rank has found.

    Attributes:
        own: its non-finite gradients, by path.
        sums: its non-finite results, by path.
        left_out: number of leaves that are not listed, of all three.
        states: those in its states of the hook, by bucket and leaf.
    """

    own: Mapping[str, Count]
    sums: Mapping[str, Count]
    left_out: int = 0
    states: Mapping[str, Count] = MappingProxyType({})

    def to_json(self) -> list[Any]:
        """Return the message to other ranks, with at most `MOST_NAMED` leaves of each kind.

        Example:
            >>> counts = NonFiniteCounts({"w": Count(nan=1, inf=2)}, {})
            >>> NonFiniteCounts.from_json(counts.to_json()) == counts
            True
        """
        found = self.own, self.sums, self.states
        own, sums, states = (dict(list(counts.items())[:MOST_NAMED]) for counts in found)
        cut = sum(map(len, found)) - len(own) - len(sums) - len(states)
        return [own, sums, self.left_out + cut, states]

    @classmethod
    def from_json(cls, message: Sequence[Any]) -> NonFiniteCounts:
        """Return the counts in a message of the schema `COUNTS`."""
        own, sums, left_out, states = message
        return cls(_counts(own), _counts(sums), left_out, _counts(states))


def tally(tensor: Tensor, *others: Tensor) -> Tensor:
    """Count the elements that are NaN, and those that are infinite, in any summand of one leaf;
    shape `(2,)`, on the device of the summands."""
    with torch.no_grad():
        if not others and tensor.is_sparse:
            tensor = tensor._values()
        summands = [one.to_dense() if one.is_sparse else one for one in (tensor, *others)]
        nan = reduce(torch.logical_or, map(torch.isnan, summands))
        inf = reduce(torch.logical_or, map(torch.isinf, summands))
        return torch.stack([nan.sum(), (inf & ~nan).sum()])


def counted(tallies: Iterable[tuple[str, Tensor]]) -> dict[str, Count]:
    """Return the sums of tallies by path, in this order; waits for an accelerator. Leaves without
    non-finite numbers are left out."""
    found: dict[str, Count] = {}
    for path, numbers in tallies:
        nan, inf = numbers.tolist()
        if nan or inf:
            before = found.get(path, Count(0, 0))
            found[path] = Count(before.nan + nan, before.inf + inf)
    return found


def _counts(found: Mapping[str, Any]) -> dict[str, Count]:
    return {path: Count(*count) for path, count in found.items()}


def nonfinite_error(
    step: int,
    found_by_rank: Sequence[NonFiniteCounts],
    wires: Mapping[str, str],
    hook: str | None = None,
    *,
    result_kind: ResultKind = "replicated",
) -> NonFiniteError:
    """Return the error of a step under the policy "raise"; the same on every rank.

    Args:
        step: number of the step.
        found_by_rank: counts of all ranks.
        wires: dtype in which each leaf was summed, by path.
        hook: name of the communication hook, if there is one.
        result_kind: kind of the results.

    Example:
        >>> found = [NonFiniteCounts({}, {}), NonFiniteCounts({"w": Count(nan=2, inf=1)}, {})]
        >>> print(nonfinite_error(7, found, {"w": "float32"}))
        step 7: gradients are not finite: rank 1 has 2 NaN and 1 infinity in leaf 'w'; no rank \
got any gradients, and the group can go on: leave this batch out, or ask for nonfinite='skip'
    """
    counts = {rank: dict(found.own) for rank, found in enumerate(found_by_rank) if found.own}
    states = {rank: found.states for rank, found in enumerate(found_by_rank) if found.states}
    overflowed = {} if counts else _joined(found_by_rank, result_kind)
    way_on = "no rank got any gradients, and the group can go on"
    if counts:
        text = (
            f"step {step}: gradients are not finite: {_by_rank(counts)}; {way_on}: leave this "
            f"batch out, or ask for nonfinite='skip'"
        )
    elif states:
        text = (
            f"step {step}: every rank's gradients are finite, and the state of {hook} is not: "
            f"{_by_rank(states)}; {way_on}: pass a state from before, or that of init_state"
        )
    elif result_kind == "own":
        sums = {rank: found.sums for rank, found in enumerate(found_by_rank) if found.sums}
        text = (
            f"step {step}: every rank's gradients are finite, and the results of {hook} are not: "
            f"{_by_rank(sums)}; {way_on}: lower the loss scale, or leave out the hook"
        )
    else:
        formats = sorted({wires.get(path, "its own dtype") for path in overflowed})
        text = (
            f"step {step}: every rank's gradients are finite, and their sum over ranks in "
            f"{' and '.join(formats)} overflowed: it has {_listed(overflowed)}; {way_on}: "
            f"{_overflow_advice(formats, hook)}"
        )
    left_out = sum(found.left_out for found in found_by_rank)
    if left_out:
        text += f" (and {left_out} leaves that are not listed)"
    return NonFiniteError(text, step=step, counts=counts, overflowed=overflowed)


def deferred_error(step: int, paths: Sequence[str]) -> NonFiniteError:
    """Return the error of a step under the policy "raise" whose report was read later; the same on
    every rank.

    Args:
        step: number of the step.
        paths: leaves whose results are not finite, at least one.

    Example:
        >>> print(deferred_error(7, ["b", "w"]))
        step 7: results have NaN or infinity in leaf 'b', leaf 'w'. They come from a gradient of \
any rank, or from the sum over ranks; report='now' names ranks and counts. report='next' has \
returned these results before: go back to parameters and state from before the step, unless the \
optimizer left it out by found_inf; the group is in step and can go on
    """
    text = (
        f"step {step}: results have NaN or infinity in {_first([*map(leaf_text, paths)])}. They "
        f"come from a gradient of any rank, or from the sum over ranks; report='now' names ranks "
        f"and counts. report='next' has returned these results before: go back to parameters and "
        f"state from before the step, unless the optimizer left it out by found_inf; the group is "
        f"in step and can go on"
    )
    return NonFiniteError(text, step=step, leaves=paths)


def _joined(found_by_rank: Sequence[NonFiniteCounts], result_kind: ResultKind) -> dict[str, Count]:
    """Counts of the results: of any rank, the sum over shards, or the largest of own results."""
    joined: dict[str, Count] = {}
    for found in found_by_rank[:1] if result_kind == "replicated" else found_by_rank:
        for path, count in found.sums.items():
            before = joined.get(path, Count(0, 0))
            join = max if result_kind == "own" else operator.add
            joined[path] = Count(*map(join, before, count))
    return joined


def _by_rank(counts: Mapping[int, Mapping[str, Count]]) -> str:
    return "; ".join(f"rank {rank} has {_listed(found)}" for rank, found in counts.items())


def _listed(found: Mapping[str, Count]) -> str:
    return _first([f"{count} in {leaf_text(path)}" for path, count in found.items()])


def _first(listed: Sequence[str]) -> str:
    rest = len(listed) - _MOST_WRITTEN
    return ", ".join(listed[:_MOST_WRITTEN]) + (f" and more in {rest} others" if rest > 0 else "")


def _overflow_advice(formats: Sequence[str], hook: str | None) -> str:
    if hook is not None:
        return f"lower the loss scale, or leave out the hook {hook}, if it sums in a narrower dtype"
    if "float16" in formats:
        return "sum in float32 by reduce_dtype=torch.float32, or lower the loss scale"
    return "lower the loss scale, or divide all weights by one number"
