"""Periodic schedules: when the fragments of a tree are averaged, over many steps, as values.

A schedule of one step (`fddp.Schedule`) averages gradients. A periodic schedule averages the
parameters or outer gradients of one fragment of the tree at a time, once in a period of many steps:
local SGD, DiLoCo (A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
Models", arXiv 2311.08105), or Streaming DiLoCo (A. Douillard et al., "Streaming DiLoCo with
overlapping communication", arXiv 2501.18512).

The events of a step follow from the periods alone, so all ranks start collectives in one order.
What is left to prove is proved when a schedule is made: no leaf is in two fragments, and no
fragment is in flight when it is started again; and by `PeriodicSync`: no leaf is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import lcm
from typing import Literal, NamedTuple

from fddp.errors import ScheduleError
from fddp.extend import counted, leaf_text, size_text


@dataclass(frozen=True)
class Periodic:
    """Averages at step `warmup_steps` (steps count from 0), and then once in every period.

    Args:
        period: number of steps between averages.
        warmup_steps: number of steps before the first average.

    Raises:
        ValueError: the period is below 1, or the warm-up below 0.

    Example:
        >>> when = Periodic(4, warmup_steps=2)
        >>> [step for step in range(12) if when.due(step)]
        [2, 6, 10]
    """

    period: int
    warmup_steps: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        _check_int("period", self.period, least=1)
        _check_int("warmup_steps", self.warmup_steps, least=0)

    def due(self, step: int) -> bool:
        """Return True if an average is due after a step.

        Args:
            step: number of the last step, from 0.
        """
        since = step - self.warmup_steps
        return since >= 0 and since % self.period == 0


@dataclass(frozen=True)
class Fragment:
    """Leaves that are averaged together.

    Attributes:
        paths: paths of the leaves.
        nbytes: bytes of the leaves.
        when: steps after which the collective is started.
        delay: number of steps from the start of the collective to its application, which overlap
            with it. At most the period.
        mixing: share of this rank's own parameters that remains when an average is applied, from 0
            (only the average) to 1; called alpha in Streaming DiLoCo.

    Raises:
        ScheduleError: the delay is longer than the period; or there are no leaves, or one twice.
        ValueError: a field is out of range.
    """

    paths: tuple[str, ...]
    nbytes: int
    when: Periodic
    delay: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        _check_int("nbytes", self.nbytes, least=0)
        _check_int("delay", self.delay, least=0)
        if not 0.0 <= self.mixing <= 1.0:
            raise ValueError(f"mixing must be a number from 0 to 1, got {self.mixing!r}")
        if not self.paths:
            raise ScheduleError("a fragment has no leaves; leave it out")
        if self.delay > self.when.period:
            raise ScheduleError(
                f"fragment of leaves {self.paths[0]!r} to {self.paths[-1]!r}: its delay of "
                f"{counted(self.delay, 'step')} is longer than its period of {self.when.period}, "
                f"so that its collective would be in flight when it is started again",
                paths=self.paths,
            )

    def __str__(self) -> str:
        return (
            f"{self.paths[0]} .. {self.paths[-1]} ({counted(len(self.paths), 'leaf')}, "
            f"{size_text(self.nbytes)}): after step {self.when.warmup_steps} and every "
            f"{counted(self.when.period, 'step')}, delay {self.delay}, mixing {self.mixing:g}"
        )


class Event(NamedTuple):
    """An action on one fragment after a step.

    Attributes:
        kind: "start" to start the collective, "apply" to wait for it and use the average.
        fragment: index of the fragment.
    """

    kind: Literal["start", "apply"]
    fragment: int


@dataclass(frozen=True, repr=False)
class PeriodicSchedule:
    """Fragments of a tree with their periods, the same on every rank. `str` of it is a table.

    Attributes:
        fragments: parts of the tree.

    Raises:
        ScheduleError: a leaf is in two fragments; the text names them.

    Example:
        >>> halves = (Fragment(("a",), 16, Periodic(4, warmup_steps=1), delay=1),
        ...           Fragment(("b",), 16, Periodic(4, warmup_steps=3), delay=1))
        >>> PeriodicSchedule(halves).due(4)
        (Event(kind='apply', fragment=1),)
    """

    fragments: tuple[Fragment, ...]

    def __post_init__(self) -> None:
        owners: dict[str, int] = {}
        for number, fragment in enumerate(self.fragments):
            for path in fragment.paths:
                if path in owners:
                    where = f"fragments {owners[path]} and {number}"
                    where = where if owners[path] != number else f"fragment {number} twice"
                    raise ScheduleError(
                        f"{leaf_text(path)} is in {where}; each leaf must be in one fragment",
                        paths=(path,),
                    )
                owners[path] = number

    def due(self, step: int) -> tuple[Event, ...]:
        """Return the events after a step, in the order of execution: delayed averages are applied,
        then all collectives that are due are started, and then those without delay are applied.

        Args:
            step: number of the last step, from 0.
        """
        numbered = [*enumerate(self.fragments)]
        late = [n for n, f in numbered if f.delay and f.when.due(step - f.delay)]
        starts = [n for n, f in numbered if f.when.due(step)]
        at_once = [n for n in starts if not self.fragments[n].delay]
        return (*_events("apply", late), *_events("start", starts), *_events("apply", at_once))

    @property
    def cycle(self) -> int:
        """Number of steps after which the events repeat."""
        return lcm(*(fragment.when.period for fragment in self.fragments))

    @property
    def warmup_steps(self) -> int:
        """Number of steps before which some fragment has not been started."""
        return max((fragment.when.warmup_steps for fragment in self.fragments), default=0)

    def __repr__(self) -> str:
        leaves = sum(len(fragment.paths) for fragment in self.fragments)
        return (
            f"PeriodicSchedule({counted(len(self.fragments), 'fragment')}, "
            f"{counted(leaves, 'leaf')}, repeats after {counted(self.cycle, 'step')})"
        )

    def __str__(self) -> str:
        """A line for each fragment."""
        return "\n".join([repr(self), *map(str, self.fragments)])


def _events(kind: Literal["start", "apply"], fragments: Iterable[int]) -> list[Event]:
    return [Event(kind, fragment) for fragment in fragments]


def _check_int(name: str, value: int, *, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
