"""Periodic schedules: when the fragments of a tree are averaged, over many steps, as values.

A schedule of one step (`fddp.Schedule`) averages gradients. A periodic schedule averages the
parameters or outer gradients of one fragment of the tree at a time, once in a period of many steps:
local SGD, DiLoCo (A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
Models", arXiv 2311.08105), Streaming DiLoCo (A. Douillard et al., "Streaming DiLoCo with
overlapping communication", arXiv 2501.18512), or layer-wise partial synchronisation (Z. Tang et
al., "DreamDDP", arXiv 2502.11058). `fddp.check_schedule` proves that its events keep the periods
that it states.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Literal, NamedTuple, get_args

from fddp.core.plan.leaf import LeafSpec, are_leaves, is_counts
from fddp.core.protocol.differences import LEAVES
from fddp.core.protocol.messages import Schema, decode
from fddp.core.schedule.op import is_texts
from fddp.core.schedule.periods import Periodic
from fddp.core.tables import abridged, html_table, plain_table
from fddp.core.text import counted, size_text

EventKind = Literal["start", "apply"]

_FORMAT = "fddp.PeriodicSchedule/1"  # name and version: the first field of every document
_SCHEMA: Schema = {
    "format": _FORMAT,
    "leaves": LEAVES,
    "fragments": [([int], [(str, int)], int, int, float)],
    "cycle": int,
    "events": [(int, str, int, [str])],
}
_HEADER = ("fragment", "leaves", "first", "last", "size", "period", "first step", "delay", "mixing")
_NUMERIC_COLUMNS = (0, 1, 4, 6, 7, 8)
_SHOWN = 60


@dataclass(frozen=True)
class Fragment:
    """Leaves that are averaged together, and the periods that their events must keep.

    Attributes:
        leaves: indices into the leaves of the schedule, ascending.
        when: steps after which the collective is started, with its axes.
        delay: number of steps from the start of the collective to its application, which overlap
            with it. At most the shortest period.
        mixing: share of this rank's own parameters that remains when an average is applied, from 0
            (only the average) to 1; called alpha in Streaming DiLoCo.

    Raises:
        ValueError: a field has the wrong type or is out of range.
    """

    leaves: tuple[int, ...]
    when: Periodic
    delay: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        if not is_counts(self.leaves):
            raise ValueError(f"leaves must be a tuple of leaf indices, got {self.leaves!r}")
        if not isinstance(self.when, Periodic):
            raise ValueError(f"when must be a Periodic, got {self.when!r}")
        if not is_counts((self.delay,)):
            raise ValueError(f"delay must be an int of at least 0, got {self.delay!r}")
        is_number = isinstance(self.mixing, (int, float)) and not isinstance(self.mixing, bool)
        if not is_number or not 0.0 <= self.mixing <= 1.0:
            raise ValueError(f"mixing must be a number from 0 to 1, got {self.mixing!r}")


class Event(NamedTuple):
    """An action on one fragment after a step.

    Attributes:
        position: step within the cycle, from 0.
        kind: "start" to start the collective, "apply" to wait for it and use the average.
        fragment: index of the fragment.
        axes: axes along which the collective averages, outermost first.
    """

    position: int
    kind: EventKind
    fragment: int
    axes: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class PeriodicSchedule:
    """Events of one cycle of steps, the same on every rank, which then repeat.

    Construction validates types only. `fddp.check_schedule` proves that the events keep the periods
    of the fragments.

    Attributes:
        leaves: the leaves of the tree that can be averaged: those of a floating or complex dtype.
        fragments: parts of the tree, with the periods to keep.
        cycle: number of steps after which the events repeat.
        events: events of the steps 0 to `cycle - 1`, in the order of execution.

    Raises:
        ValueError: a field has the wrong type.

    Example:
        >>> leaves = [LeafSpec(name, (4,), "float32") for name in "ab"]
        >>> halves = [Fragment((0,), Periodic(4, warmup_steps=1), delay=1),
        ...           Fragment((1,), Periodic(4, warmup_steps=3), delay=1)]
        >>> schedule = make_periodic_schedule(leaves, halves)
        >>> [(event.kind, event.fragment) for event in schedule.due(4)]
        [('apply', 1)]
        >>> PeriodicSchedule.from_json(schedule.to_json()) == schedule
        True
    """

    leaves: tuple[LeafSpec, ...]
    fragments: tuple[Fragment, ...]
    cycle: int
    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.leaves, tuple) or not are_leaves(self.leaves):
            raise ValueError(f"leaves must be a tuple of LeafSpec, got {_short(self.leaves)}")
        for name, kind in (("fragments", Fragment), ("events", Event)):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not {*map(type, values)} <= {kind}:
                raise ValueError(f"{name} must be a tuple of {kind.__name__}, got {_short(values)}")
        if not is_counts((self.cycle,), at_least=1):
            raise ValueError(f"cycle must be an int of at least 1, got {self.cycle!r}")
        for number, event in enumerate(self.events):
            is_event = is_counts((event.position, event.fragment)) and is_texts(event.axes)
            if not is_event or event.kind not in get_args(EventKind):
                raise ValueError(f"events[{number}] is no event: {_short(event)}")
            if event.fragment >= len(self.fragments):
                raise ValueError(
                    f"events[{number}] is of fragment {event.fragment}, and there are "
                    f"{counted(len(self.fragments), 'fragment')}"
                )

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[type[PeriodicSchedule], tuple[object, ...]]:
        # Drops cached properties, and validates the fields again on loading.
        return type(self), (self.leaves, self.fragments, self.cycle, self.events)

    def due(self, step: int) -> tuple[Event, ...]:
        """Return the events after a step, in the order of execution.

        A fragment has none before its first start.

        Args:
            step: number of the last step, from 0.
        """
        found = []
        for event in self._by_position.get(step % self.cycle, ()):
            fragment = self.fragments[event.fragment]
            started = step - (fragment.delay if event.kind == "apply" else 0)
            if started >= fragment.when.warmup_steps:
                found.append(event)
        return tuple(found)

    @cached_property
    def _by_position(self) -> dict[int, list[Event]]:
        found: dict[int, list[Event]] = {}
        for event in self.events:
            found.setdefault(event.position, []).append(event)
        return found

    def paths(self, fragment: int) -> tuple[str, ...]:
        """Paths of the leaves of a fragment."""
        return tuple(self.leaves[leaf].path for leaf in self.fragments[fragment].leaves)

    def nbytes(self, fragment: int) -> int:
        """Bytes of a fragment, in the dtypes of its leaves."""
        return sum(self.leaves[leaf].nbytes for leaf in self.fragments[fragment].leaves)

    def describe(self, fragment: int) -> str:
        """Describe a fragment by its index, first leaf and last leaf, for errors."""
        leaves = self.fragments[fragment].leaves
        known = [self.leaves[leaf].path for leaf in leaves if leaf < len(self.leaves)]
        if not known:
            return f"fragment {fragment}, without leaves"
        if len(known) == 1:
            return f"fragment {fragment}, leaf {known[0]!r}"
        return f"fragment {fragment}, leaves {known[0]!r} to {known[-1]!r}"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the schedule's JSON, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the schedule as one line of JSON. `from_json` restores an equal schedule."""
        document = {
            "format": _FORMAT,
            "leaves": self.leaves,
            "fragments": [
                (f.leaves, f.when.periods, f.when.warmup_steps, f.delay, f.mixing)
                for f in self.fragments
            ],
            "cycle": self.cycle,
            "events": self.events,
        }
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PeriodicSchedule:
        """Restore a schedule from `to_json`. `fddp.check_schedule` verifies its events.

        Raises:
            ValueError: the text is malformed; the message names the field.
        """
        document = decode(text, _SCHEMA, "periodic schedule JSON")
        return cls(
            tuple(
                LeafSpec(path, tuple(shape), dtype, strides and tuple(strides), device, sparse)
                for path, shape, dtype, strides, device, sparse in document["leaves"]
            ),
            tuple(
                Fragment(tuple(leaves), Periodic(dict(periods), warmup_steps=first), delay, mixing)
                for leaves, periods, first, delay, mixing in document["fragments"]
            ),
            document["cycle"],
            tuple(
                Event(position, kind, fragment, tuple(axes))
                for position, kind, fragment, axes in document["events"]
            ),
        )

    def __repr__(self) -> str:
        return (
            f"PeriodicSchedule({counted(len(self.fragments), 'fragment')}, "
            f"{counted(len(self.leaves), 'leaf')}, "
            f"{counted(len(self.events), 'event')} in {counted(self.cycle, 'step')})"
        )

    def __str__(self) -> str:
        """Table of the fragments."""
        rows = map(self._row, range(len(self.fragments)))
        return f"{self!r}\n{plain_table(_HEADER, rows, _NUMERIC_COLUMNS)}"

    def _repr_html_(self) -> str:
        left_out = ("…", "({} more fragments)")
        return html_table(
            repr(self), _HEADER, abridged(len(self.fragments), self._row, _SHOWN, left_out)
        )

    def _row(self, number: int) -> tuple[str, ...]:
        fragment = self.fragments[number]
        paths, when = self.paths(number), fragment.when
        single = len(when.periods) == 1
        return (
            str(number),
            str(len(paths)),
            paths[0] if paths else "-",
            paths[-1] if paths else "-",
            size_text(self.nbytes(number)),
            str(when.longest) if single else ", ".join(f"{axis}={n}" for axis, n in when.periods),
            str(when.warmup_steps),
            str(fragment.delay),
            f"{fragment.mixing:g}",
        )


def make_periodic_schedule(
    leaves: Sequence[LeafSpec], fragments: Sequence[Fragment]
) -> PeriodicSchedule:
    """Return the schedule that keeps the periods of the fragments.

    After each step, delayed averages are applied first. Then all collectives that are due are
    started, and then those without delay are applied.

    Args:
        leaves: the leaves that are averaged.
        fragments: parts of the tree, with periods.

    Raises:
        ValueError: a field has the wrong type.
    """
    cycle = lcm(*(fragment.when.longest for fragment in fragments))
    ordered = []
    for number, fragment in enumerate(fragments):
        when, delay = fragment.when, fragment.delay
        first = when.warmup_steps
        for step in range(first, first + cycle, when.shortest):
            start = Event(step % cycle, "start", number, when.due(step))
            applied = Event((step + delay) % cycle, "apply", number, start.axes)
            ordered += [
                ((start.position, 1), start),
                ((applied.position, 0 if delay else 2), applied),
            ]
    ordered.sort()
    return PeriodicSchedule(
        tuple(leaves), tuple(fragments), cycle, tuple(event for _, event in ordered)
    )


def _short(value: object) -> str:
    return reprlib.repr(value)
