"""Observers of one run: its collectives, and the values that Python reads from tensors."""

from __future__ import annotations

import random
import re
import sys
import sysconfig
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fddp.extend import Operation, Rendezvous, Site, call_site

_BUCKET = re.compile(r"^bucket \d+ \(.*?\) of ")
_FACTORS = (1e-9, 1e9)
_OWN = f"{Path(__file__).parents[2]}/"
_PACKAGES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])
_READING = frozenset(
    ("item", "__bool__", "__float__", "__int__", "__index__", "is_nonzero", "equal", "allclose")
)


class Collective(NamedTuple):
    """A collective of a run.

    Attributes:
        rendezvous: has `what`, the description of the operation.
        form: kind, dtype and shape.
        site: line of the user's code.
        sent, result: values before and after.
    """

    rendezvous: Rendezvous
    form: str
    site: Site
    sent: Tensor
    result: Tensor

    @property
    def place(self) -> str:
        """Line of the user's code, as text."""
        return str(self.site)

    @property
    def called_at(self) -> str:
        """Line of the operator; of a derivative that of the operator whose derivative it is. The
        user's line if that is one of an installed package."""
        named = re.search(r", called at (\S+:\d+)", self.text)
        return named[1] if named and "-packages/" not in named[1] else self.place

    @property
    def text(self) -> str:
        """Description of the operation, with its line."""
        what = self.rendezvous.what or self.form
        return what if ", called at " in what else f"{what}, called at {self.place}"

    @property
    def call(self) -> str:
        """The call that it belongs to, which may have several buckets."""
        return _BUCKET.sub("", self.text)

    def is_like(self, other: Collective) -> bool:
        """Return True if ranks would match the two."""
        return (self.form, self.place) == (other.form, other.place)


class Transfers:
    """Collectives of a run. Those of an earlier run give this one its results, as if this rank took
    part in the same collectives.

    Args:
        earlier: collectives of that run; empty if there is none.
        factor: factor on the results of `psum`.
    """

    def __init__(self, earlier: Sequence[Collective] = (), factor: int = 1) -> None:
        self.collectives: list[Collective] = []
        self._earlier, self._replays = earlier, bool(earlier)
        self._factor = factor

    def __call__(self, rendezvous: Rendezvous, operation: Operation, result: Tensor) -> Tensor:
        """Return the result that this rank gets."""
        if operation.fixed_size:
            return result  # of the library's own data, which ranks compare
        number, sent = len(self.collectives), operation.tensor.clone()
        own = Collective(rendezvous, str(operation), call_site(*_PACKAGES), sent, result.clone())
        self._replays &= number < len(self._earlier) and own.is_like(self._earlier[number])
        self.collectives.append(own)
        if self._replays and operation.kind != "all_to_all":  # each rank gets another part
            self.collectives[-1] = own._replace(result=self._earlier[number].result)
            return self._earlier[number].result
        return result * self._factor if self._factor > 1 and self._is_sum() else result

    def _is_sum(self) -> bool:
        """Return True if the newest collective is of a `psum`, which begins with a handshake."""
        if not is_reduction(self.collectives[-1]):
            return False
        others = (own for own in reversed(self.collectives) if not is_reduction(own))
        handshake = next((own.rendezvous.what for own in others), "")
        return is_sum(self.collectives[-1].rendezvous.what or handshake)


def is_sum(what: str) -> bool:
    """Return True for the description of a sum that is asked for as one. Within a mean, a sum is
    divided later."""
    return "psum of" in what or "(SUM) of" in what


def first_difference(
    collectives: Sequence[Collective], others: Sequence[Collective]
) -> tuple[Collective | None, Collective | None] | None:
    """The first collectives in which two runs differ; None if they make the same."""
    for own, other in zip_longest(collectives, others):
        if own is None or other is None or not own.is_like(other):
            return own, other
    return None


class Read(NamedTuple):
    """A number that Python read from tensors."""

    site: Site
    value: bool | int | float


class Reads(TorchFunctionMode):
    """Numbers that Python reads from tensors; some are replaced.

    Args:
        at: places at which numbers are replaced by others.
        seed: of the other numbers.
    """

    def __init__(self, at: frozenset[Site] = frozenset(), seed: int = 0) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self._at, self._random = at, random.Random(seed)
        self._usual = _FACTORS[seed % 2]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, and note a number that it returns."""
        value = func(*args, **(kwargs or {}))
        caller = sys._getframe(1).f_code.co_filename
        reads = getattr(func, "__name__", "") in _READING and not caller.startswith(_OWN)
        if not reads or type(value) not in (bool, int, float):
            return value
        site = call_site()
        self.reads.append(Read(site, value))
        return self._other(value) if site in self._at else value

    def _other(self, value: bool | int | float) -> bool | int | float:
        # Now and then in the other direction, so that loops end.
        usual = self._random.random() < 0.8
        if isinstance(value, bool):
            return (self._usual > 1) == usual
        if isinstance(value, int):
            return 10 * value + 1 if (self._usual > 1) == usual else 0
        return value * (self._usual if usual else 1 / self._usual)


def varying_reads(reads: Sequence[Read], others: Sequence[Read]) -> frozenset[Site]:
    """Places at which two runs read other numbers."""
    return frozenset(
        own.site
        for own, other in zip(reads, others, strict=False)
        if own.site == other.site and own.value != other.value
    )


def is_reduction(collective: Collective) -> bool:
    """Return True for sums and means of floating-point numbers."""
    reduces = "all_reduce" in collective.form or "reduce_scatter" in collective.form
    return reduces and torch.is_floating_point(collective.sent)
