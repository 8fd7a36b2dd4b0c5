"""Faults as values, drawn by a generator with a seed."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields
from itertools import count as count_up
from itertools import cycle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

STEPS = 4  # of an undisturbed run
TIMEOUT_S = 3.0

ALL_STAGES = (
    "construction",
    "forward",
    "first bucket",
    "between buckets",
    "control word",
    "unpack",
    "update",
)
IN_A_STEP = ALL_STAGES[1:]

#: where each kind of fault can strike
STAGES: dict[str, tuple[str, ...]] = {
    "kill": ALL_STAGES,
    "exec": ALL_STAGES,
    "exit": ("construction", "update"),
    "error at start": ("start",),
    "few descriptors": IN_A_STEP,
    "long stop": ALL_STAGES,
    "short stop": ALL_STAGES,
    "error in loss": ("forward",),
    "error in hook": ("first bucket", "between buckets"),
    "error in data": ("update",),
    "interrupt": ALL_STAGES,
    "huge tensor": ("forward", "update"),
    "address space": ("forward",),
    "no bucket memory": ("first bucket", "between buckets"),
    "no bucket memory at all": ("first bucket", "between buckets"),
    "full shm": ("construction", "first bucket"),
    "closed socket": IN_A_STEP,
    "closed store": IN_A_STEP,
}

TRANSPORTS = ("c10d", "shm")
WAYS = ("function", "module")
WORLD_SIZES = (2, 3, 4)
_TRIES = 100  # to draw another fault than those before
#: exchanges of a construction before which a fault can strike, from 0
EXCHANGES = 3


@dataclass(frozen=True)
class Fault:
    """A fault, with its rank and time.

    Attributes:
        kind: of `STAGES`, or "none".
        rank: on which it happens.
        stage: of the step.
        step: its number; during construction the number of exchanges that come before it.
        transport: which the ranks use.
        world_size: number of ranks.
        timeout_s: of the ranks' operations.
        duration_s: of a stop; 0 elsewhere.
        way: how the program trains: by `value_and_grad` within `uneven`, or by
            `DistributedDataParallel`.
    """

    kind: str
    rank: int
    stage: str
    step: int
    transport: str
    world_size: int
    timeout_s: float = TIMEOUT_S
    duration_s: float = 0.0
    way: str = "function"

    @property
    def text(self) -> str:
        """On one line, for `parse`."""
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())


def parse(text: str) -> Fault:
    """The fault of this `text`.

    >>> parse(Fault("kill", 1, "unpack", 2, "shm", 3).text)
    Fault(kind='kill', rank=1, stage='unpack', step=2, transport='shm', world_size=3, ...)
    """
    values = dict(part.split("=", 1) for part in text.split(","))
    types = {"int": int, "float": float, "str": str}
    return Fault(
        **{field.name: types[str(field.type)](values[field.name]) for field in fields(Fault)}
    )


def draw(seed: int, count: int) -> list[Fault]:
    """So many faults; kinds, transports and stages take turns, so that few faults have many kinds.

    >>> draw(1, 5) == draw(1, 9)[:5]
    True
    """
    source = random.Random(seed)
    drawn: dict[Fault, None] = {}  # in order
    for turn in _turns(source):
        if len(drawn) == count:
            break
        for _ in range(_TRIES):
            fault = _draw(source, *turn)
            if fault not in drawn:
                break
        drawn[fault] = None
    return list(drawn)


def _turns(source: random.Random) -> Iterator[tuple[str, str, str]]:
    """Kinds with transports and stages; kills twice as often as other kinds."""
    kinds = [*STAGES, "kill"]
    source.shuffle(kinds)
    pairs = {(kind, transport) for kind in STAGES for transport in TRANSPORTS}
    stages = {pair: cycle(_shuffled(source, STAGES[pair[0]])) for pair in sorted(pairs)}
    for turn in count_up():
        for place, kind in enumerate(kinds):
            transport = TRANSPORTS[(turn + place) % len(TRANSPORTS)]
            yield kind, transport, next(stages[kind, transport])


def _shuffled(source: random.Random, items: Iterable[str]) -> list[str]:
    return source.sample(list(items), len(list(items)))


def _draw(source: random.Random, kind: str, transport: str, stage: str) -> Fault:
    world_size = source.choice(WORLD_SIZES)
    within = (
        EXCHANGES if stage == "construction" else STEPS - 1
    )  # one more follows, in which it shows
    duration_s = {"long stop": TIMEOUT_S + 1.5, "short stop": 0.4 * TIMEOUT_S}.get(kind, 0.0)
    return Fault(
        kind,
        source.randrange(world_size),
        stage,
        source.randrange(within),
        transport,
        world_size,
        duration_s=duration_s,
        way=source.choice(WAYS),
    )
