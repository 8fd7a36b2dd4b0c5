"""What becomes of a step whose gradients are not finite, and what ranks tell each other of it.

Whether a rank's gradients are finite is seen as they are packed, and rides in the control word.
Whether sums are, each rank sees in the results. Leaves are looked at, and texts exchanged, only
under "raise", and only once something was found.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fddp.core.protocol.messages import MappingOf, Schema, decode
from fddp.errors import NonFiniteError
from fddp.native.layout import Layout, views

Policy = Literal["propagate", "skip", "raise"]

Holding = Literal["alike", "parts", "own"]
"""What ranks hold of the results: all the same, each other elements, or each results of its own."""

MOST_NAMED = 100
"""Leaves that one rank tells the others of."""

_ACCOUNT: Schema = (MappingOf((int, int)), MappingOf((int, int)), int)

_MOST_WRITTEN = 3  # of them in the message, for each rank


class StopStepError(Exception):
    """Ends a step in which a number is not finite, on all ranks alike; callers never see it."""


class Count(NamedTuple):
    """How many elements of a leaf are not finite."""

    nan: int
    inf: int

    def __str__(self) -> str:
        kinds = (self.nan, "NaN", "NaN"), (self.inf, "infinity", "infinities")
        return " and ".join(f"{n} {one if n == 1 else many}" for n, one, many in kinds if n)


class Account(NamedTuple):
    """What one rank found.

    Attributes:
        own: its gradients that are not finite, by path.
        sums: results that are not finite, by path; a rank sees those that it holds.
        left_out: how many leaves are not listed, of both.
    """

    own: Mapping[str, Count]
    sums: Mapping[str, Count]
    left_out: int = 0

    def encode(self) -> bytes:
        """As bytes for the other ranks, with `MOST_NAMED` leaves of each kind at most.

        Example:
            >>> account = Account({"w": Count(nan=1, inf=2)}, {})
            >>> Account.decode(account.encode()) == account
            True
        """
        own, sums = (dict(list(found.items())[:MOST_NAMED]) for found in self[:2])
        left_out = len(self.own) + len(self.sums) - len(own) - len(sums)
        return json.dumps([own, sums, left_out]).encode()

    @classmethod
    def decode(cls, text: bytes) -> Account:
        """What `encode` gave.

        Raises:
            ValueError: it is something else.
        """
        own, sums, left_out = decode(text, _ACCOUNT)
        return cls(_counts(own), _counts(sums), left_out)


class Finder:
    """Finds the leaves of one step that are not finite, where errors are to name them.

    Args:
        policy: what becomes of such steps; nothing is looked for but under "raise".
        paths: of the leaves, by number.
    """

    def __init__(self, policy: Policy, paths: Sequence[str]) -> None:
        self._wanted = policy == "raise"
        self._paths = paths
        self._found: dict[str, Count] = {}
        self._pending: list[tuple[str, Tensor]] = []  # counts that the device has not told yet

    def wants(self, buffer: Tensor, *, finite: bool) -> bool:
        """Whether to look into a bucket; `finite` says whether packing found what it read finite,
        which it does on the CPU alone."""
        return self._wanted and not (finite and buffer.is_cpu)

    def look_into(
        self,
        leaves: Sequence[int],
        layout: Layout,
        buffer: Tensor,
        parts: Sequence[Sequence[Tensor | None]] | None,
    ) -> None:
        """Takes note of gradients that were packed.

        Args:
            leaves: those of the bucket.
            layout: where they lie.
            buffer: what they were packed into; it is reduced in place later.
            parts: what was packed, by leaf, of each summand; None where it is let go of, and what
                is finite was finite in the buffer, too.
        """
        if parts is None:
            parts = [views(buffer, layout)]
        for leaf, *grads in zip(leaves, *parts, strict=True):
            summands = [grad for grad in grads if grad is not None]
            if summands:
                self._pending.append((self._paths[leaf], _tally(*summands)))

    def look_at(self, leaves: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Takes note of gradients of these leaves; does not wait for an accelerator."""
        if self._wanted:
            for leaf, grad in zip(leaves, grads, strict=True):
                if grad is not None:
                    self._pending.append((self._paths[leaf], _tally(grad)))

    def account(self, results: Sequence[Tensor | None]) -> Account:
        """What was found, with these results by leaf."""
        for path, tally in self._pending:
            _add(self._found, path, tally)
        self._pending.clear()
        sums: dict[str, Count] = {}
        for path, result in zip(self._paths, results, strict=False):
            if result is not None:
                _add(sums, path, _tally(result))
        own = {path: self._found[path] for path in self._paths if path in self._found}
        return Account(own, sums)


def _tally(tensor: Tensor, *others: Tensor) -> Tensor:
    """How many elements are NaN, and how many infinite, in any of the summands of one leaf; shape
    `(2,)`, where they are."""
    with torch.no_grad():
        if not others and tensor.is_sparse:
            tensor = tensor._values()
        summands = [one.to_dense() if one.is_sparse else one for one in (tensor, *others)]
        nan = reduce(torch.logical_or, map(torch.isnan, summands))
        inf = reduce(torch.logical_or, map(torch.isinf, summands))
        return torch.stack([nan.sum(), (inf & ~nan).sum()])


def _add(found: dict[str, Count], path: str, tally: Tensor) -> None:
    nan, inf = tally.tolist()
    if nan or inf:
        before = found.get(path, Count(0, 0))
        found[path] = Count(before.nan + nan, before.inf + inf)


def _counts(found: Mapping[str, Any]) -> dict[str, Count]:
    return {path: Count(*count) for path, count in found.items()}


def nonfinite_error(
    step: int,
    accounts: Sequence[Account],
    wires: Mapping[str, str],
    hook: str | None = None,
    *,
    holding: Holding = "alike",
    outgrown: bool = False,
) -> NonFiniteError:
    """The error of a step under "raise"; the same on every rank.

    Args:
        step: its number.
        accounts: what each rank found, by rank.
        wires: in which dtype each leaf was summed, by path.
        hook: name of the communication hook, if there is one.
        holding: what ranks hold of the results.
        outgrown: whether gradients were scaled for weights below those of the step.

    Example:
        >>> accounts = [Account({}, {}), Account({"w": Count(nan=2, inf=1)}, {})]
        >>> print(nonfinite_error(7, accounts, {"w": "float32"}))
        step 7: gradients are not finite: rank 1 has 2 NaN and 1 infinity in leaf 'w'; no rank \
got any gradients, and the group can go on: leave this batch out, or ask for nonfinite='skip'
    """
    counts = {rank: dict(account.own) for rank, account in enumerate(accounts) if account.own}
    overflowed = {} if counts else _joined(accounts, holding)
    way_on = "no rank got any gradients, and the group can go on"
    if counts:
        found = "; ".join(f"rank {rank} has {_listed(own)}" for rank, own in counts.items())
        text = (
            f"step {step}: gradients are not finite: {found}; {way_on}: leave this batch out, or "
            f"ask for nonfinite='skip'"
        )
    elif holding == "own":
        sums = {rank: account.sums for rank, account in enumerate(accounts) if account.sums}
        found = "; ".join(f"rank {rank} has {_listed(own)}" for rank, own in sums.items())
        text = (
            f"step {step}: every rank's gradients are finite, and what {hook} made of them is not: "
            f"{found}; {way_on}: lower the loss scale, or leave out the hook"
        )
    else:
        formats = sorted({wires.get(path, "its own dtype") for path in overflowed})
        text = (
            f"step {step}: every rank's gradients are finite, and their sum over ranks in "
            f"{' and '.join(formats)} overflowed: it has {_listed(overflowed)}; {way_on}: "
            f"{_overflow_advice(formats, hook, outgrown=outgrown)}"
        )
    left_out = sum(account.left_out for account in accounts)
    if left_out:
        text += f" (and {left_out} leaves that are not listed)"
    return NonFiniteError(text, step=step, counts=counts, overflowed=overflowed)


def _joined(accounts: Sequence[Account], holding: Holding) -> dict[str, Count]:
    """What is not finite of the results; of those that are each rank's own, the most of any."""
    joined: dict[str, Count] = {}
    for account in accounts[:1] if holding == "alike" else accounts:
        for path, count in account.sums.items():
            before = joined.get(path, Count(0, 0))
            join = max if holding == "own" else operator.add
            joined[path] = Count(*map(join, before, count))
    return joined


def _listed(found: Mapping[str, Count]) -> str:
    listed = [f"{count} in leaf {path!r}" for path, count in found.items()]
    rest = len(listed) - _MOST_WRITTEN
    return ", ".join(listed[:_MOST_WRITTEN]) + (f" and more in {rest} others" if rest > 0 else "")


def _overflow_advice(formats: Sequence[str], hook: str | None, *, outgrown: bool) -> str:
    if outgrown and "float16" not in formats:  # in which sums are made again by other factors
        return (
            "gradients were scaled for smaller weights than this step has, and the next step is "
            "scaled for them: call it again, or lower the loss scale"
        )
    if hook is not None:
        return f"lower the loss scale, or leave out the hook {hook}, if it narrows what is summed"
    if "float16" in formats:
        return "sum in float32 by reduce_dtype=torch.float32, or lower the loss scale"
    return "lower the loss scale, or the weights that gradients were accumulated with"
