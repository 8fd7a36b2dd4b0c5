"""Carries a schedule out, rank by rank, in the worst order that its dependencies allow.

This is the oracle of `check_schedule`, for small worlds. It shares nothing with it: every rank has
its own memory, groups are lists of ranks, chunks are cut as each rank would, and numbers are added
up. They are random residues of a prime, so that division is exact and that two different sums agree
by accident once in 2**31.

An operation begins and ends. In between, what it writes is garbage. It begins after those that it
depends on have ended, and apart from that anything may come first: launch order counts for
deadlocks only. What was skipped passes on what it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fddp.core.schedule.op import Op
from fddp.core.schedule.schedule import Schedule

PRIME = 2**31 - 1

Residues = NDArray[np.int64]
Pick = Callable[[Sequence[int]], int]


class Fate(NamedTuple):
    """Decisions of the control word about a bucket."""

    late: bool


class WrongError(Exception):
    """A wrong result."""


def find_fault(schedule: Schedule, *, tries: int = 3, seed: int = 0) -> str | None:
    """Return a fault in some order of some branch; None if none was found."""
    rng = np.random.default_rng(seed)
    try:
        _check_launches(schedule)
        for pick in _picks(schedule, rng, tries):
            for fates in _fates(schedule, rng):
                _Run(schedule, fates, rng).run(pick)
    except WrongError as error:
        return str(error)
    except (IndexError, KeyError, ValueError) as error:
        return f"can't be carried out: {error!r}"
    return None


def _fates(schedule: Schedule, rng: np.random.Generator) -> Iterator[list[Fate]]:
    buckets = len(schedule.plan.buckets)
    every = [Fate(True), Fate(False)]
    for fate in every:
        yield [fate] * buckets
    yield [every[i] for i in rng.integers(0, len(every), buckets)]


def _picks(schedule: Schedule, rng: np.random.Generator, tries: int) -> Iterator[Pick]:
    """Orders: launch order, the latest first, and by rank in a random order of all."""
    yield min
    yield max
    for _ in range(tries):
        ranking = rng.permutation(len(schedule.ops))
        yield lambda ready, ranking=ranking: min(ready, key=ranking.__getitem__)


def _check_launches(schedule: Schedule) -> None:
    """Ranks launch in order and wait before each launch: what is not launched never ends."""
    launched: set[int] = set()
    packed_later = False
    for position, op in enumerate(schedule.ops):
        if not launched.issuperset(op.deps):
            raise WrongError(f"deadlock at op {position}")
        launched.add(position)
        packed_later |= op.kind == "control"
        if packed_later and op.kind == "pack" and op.when == "always":
            raise WrongError(f"op {position} reports to no rank")
    controls = [i for i, op in enumerate(schedule.ops) if op.kind == "control"]
    if len(controls) != 1:
        raise WrongError("not one control word")
    (control,) = controls
    word = schedule.ops[control]
    if word.bucket >= 0:
        word = _carrier(schedule, control)
    if len(schedule.topology.group(word.axes, 0)) < schedule.topology.world_size:
        raise WrongError("the control word does not reach all ranks")


def _carrier(schedule: Schedule, control: int) -> Op:
    """The all-reduce in whose tail the word is; the tail lies behind the whole buffer."""
    bucket = schedule.ops[control].bucket
    waiting = [op for op in schedule.ops if control in op.deps and op.bucket == bucket]
    carriers = [op for op in waiting if op.kind == "all_reduce" and op.when == "always"]
    if not carriers:
        raise WrongError("nothing carries the control word")
    region = carriers[0].region
    if region.stop != schedule.buffer_numels[bucket] or region.buffer != "bucket":
        raise WrongError("the tail is not part of what is reduced")
    if schedule.topology.size(region.shard) > 1:
        raise WrongError("only one rank's part would end with the tail")
    wire, ranks = schedule.wire_dtypes[bucket], schedule.topology.world_size
    if wire not in ("float32", "float64") or (wire == "float32" and ranks > 2**16):
        raise WrongError("the format does not hold the control word")
    if schedule.scaling == "average":
        raise WrongError("the control word is divided")
    return carriers[0]


class _Run:
    """One execution."""

    def __init__(self, schedule: Schedule, fates: Sequence[Fate], rng: np.random.Generator) -> None:
        self.schedule = schedule
        self.fates = fates
        self.rng = rng
        self.topology = schedule.topology
        self.world = schedule.topology.world_size
        self.is_mean = schedule.result != "replicated"
        numels = schedule.buffer_numels
        self.memory = {
            (b, buffer): self.garbage(numel)
            for b, numel in enumerate(numels)
            for buffer in ("bucket", "repair")
        }
        self.packed = [self.garbage(numel) for numel in numels]
        self.late = [
            self.garbage(numel) * fate.late for numel, fate in zip(numels, fates, strict=True)
        ]
        self.taken: set[tuple[int, str]] = set()
        self.owners = [np.full(numel, -1) for numel in numels]
        self.handed_out = [np.zeros((self.world, numel), dtype=np.int64) for numel in numels]
        self.views: list[tuple[int, int, slice]] = []  # bucket, rank and elements of each result
        self.inputs: dict[int, list[Residues]] = {}
        self.knows = False  # whether the control word is in
        self.written = False  # whether ranks have put theirs in the tail
        control = next(i for i, op in enumerate(schedule.ops) if op.kind == "control")
        rides = schedule.ops[control].bucket >= 0
        self.carrier = _carrier(schedule, control) if rides else None

    def garbage(self, numel: int) -> Residues:
        return self.rng.integers(0, PRIME, (self.world, numel))

    # Order

    def run(self, pick: Pick) -> None:
        """Runs all operations; `pick` chooses the next of those that may run.

        Raises:
            WrongError: a result is not what it must be, or ranks part.
        """
        ops = self.schedule.ops
        waiting = {i: {*op.deps} for i, op in enumerate(ops)}
        heirs: dict[int, list[int]] = {i: [] for i in waiting}
        for i, deps in waiting.items():
            for dep in deps:
                heirs[dep].append(i)
        ready = sorted(i for i, deps in waiting.items() if not deps)
        while ready:
            i = pick(ready)
            if i not in self.inputs:
                self.inputs[i] = self.begin(ops[i]) if self.applies(ops[i]) else []
                continue
            ready.remove(i)
            if self.applies(ops[i]):
                self.end(ops[i], self.inputs[i])
            for heir in heirs[i]:
                waiting[heir].discard(i)
                if not waiting[heir]:
                    ready.append(heir)
            ready.sort()
        self.check_results()

    def applies(self, op: Op) -> bool:
        if op.when == "always":
            return True
        if not self.knows:
            raise WrongError(f"ranks take different branches at {op}")
        return self.fates[op.bucket].late

    # Operations

    def begin(self, op: Op) -> list[Residues]:
        """Reads what each rank has, and leaves garbage in its place."""
        if op.kind == "control":
            return []
        if op is self.carrier and not self.written:
            raise WrongError("the control word leaves before it is written")
        if op.kind in ("gather", "unpack") and not self.knows:
            raise WrongError(f"the control word is not in at {op}")
        parts = self.own_parts(op)
        if op.kind == "all_gather":
            parts = [self.chunk_in_group(op, r, part) for r, part in enumerate(self.wholes(op))]
        memory = self.memory[op.bucket, op.region.buffer]
        inputs = [memory[rank, part].copy() for rank, part in enumerate(parts)]
        if op.kind == "add":
            repair = self.memory[op.bucket, "repair"]
            inputs += [repair[rank, part].copy() for rank, part in enumerate(parts)]
        if op.kind != "unpack":
            self.scribble(op)
        return inputs

    def end(self, op: Op, inputs: list[Residues]) -> None:
        if op.kind == "control":
            self.written, self.knows = True, self.carrier is None
            return
        if op is self.carrier:
            self.knows = True
        _HANDLERS[op.kind](self, op, inputs)

    def pack(self, op: Op, inputs: list[Residues]) -> None:
        memory = self.memory[op.bucket, op.region.buffer]
        source = self.packed[op.bucket] if not self.is_mean else self.taken_by(op)
        for rank, part in enumerate(self.own_parts(op)):
            memory[rank, part] = source[rank, part]
            if not self.is_mean:
                owners = self.owners[op.bucket][part]
                if (owners >= 0).any():
                    raise WrongError(f"two shards for an element at {op}")
                owners[:] = rank

    def taken_by(self, op: Op) -> Residues:
        """Return the gradients that a pack takes: those not retained, each once."""
        b = op.bucket
        if op.when == "again" or b in self.schedule.retained:
            source = self.packed[b] + (op.when == "again") * self.late[b]
        elif (b, op.when) in self.taken:
            source = np.zeros_like(self.packed[b])
        else:
            source = self.late[b] if op.when == "late" else self.packed[b]
        self.taken.add((b, op.when))
        factor = inverse(self.world) if self.schedule.scaling == "before" else 1
        return source % PRIME * factor % PRIME

    def all_reduce(self, op: Op, inputs: list[Residues]) -> None:
        memory, parts = self.memory[op.bucket, op.region.buffer], self.own_parts(op)
        for rank, part in enumerate(parts):
            memory[rank, part] = self.total(op, inputs, rank)

    def reduce_scatter(self, op: Op, inputs: list[Residues]) -> None:
        memory, parts = self.memory[op.bucket, op.region.buffer], self.own_parts(op)
        for rank, part in enumerate(parts):
            own = self.chunk_in_group(op, rank, part)
            within = slice(own.start - part.start, own.stop - part.start)
            memory[rank, own] = self.total(op, inputs, rank)[within]

    def total(self, op: Op, inputs: list[Residues], rank: int) -> Residues:
        group = self.topology.group(op.axes, rank)
        if len({len(inputs[r]) for r in group}) > 1:
            raise WrongError(f"mismatched sizes at {op}")
        total = sum((inputs[r] for r in group), np.zeros_like(inputs[rank])) % PRIME
        if self.schedule.scaling == "average":
            total = total * inverse(len(group)) % PRIME
        return total

    def all_gather(self, op: Op, inputs: list[Residues]) -> None:
        memory, wholes = self.memory[op.bucket, op.region.buffer], self.wholes(op)
        for rank, whole in enumerate(wholes):
            for r in self.topology.group(op.axes, rank):
                chunk = self.chunk_in_group(op, r, whole)
                if chunk.stop - chunk.start != len(inputs[r]):
                    raise WrongError(f"mismatched sizes at {op}")
                memory[rank, chunk] = inputs[r]

    def add(self, op: Op, inputs: list[Residues]) -> None:
        memory = self.memory[op.bucket, "bucket"]
        for rank, part in enumerate(self.own_parts(op)):
            memory[rank, part] = (inputs[rank] + inputs[self.world + rank]) % PRIME

    def gather(self, op: Op, inputs: list[Residues]) -> None:
        memory, part = self.memory[op.bucket, "bucket"], self.own_parts(op)[0]
        everything = self.packed[op.bucket] + self.late[op.bucket]
        for rank in range(self.world):
            group = self.topology.group(op.axes, rank)
            total = sum(everything[r, part] for r in group) % PRIME
            memory[rank, part] = total * inverse(self.world) % PRIME

    def unpack(self, op: Op, inputs: list[Residues]) -> None:
        """Corrects in place, and hands out views."""
        b, memory = op.bucket, self.memory[op.bucket, "bucket"]
        is_dense_mean = self.is_mean and not self.schedule.plan.buckets[b].sparse
        factor = inverse(self.world) if is_dense_mean and self.schedule.scaling == "after" else 1
        for rank, part in enumerate(self.own_parts(op)):
            self.expect(b, rank, part, inputs[rank] * factor % PRIME)
            memory[rank, part] = memory[rank, part] * factor % PRIME
            self.handed_out[b][rank, part] += 1
            self.views.append((b, rank, part))

    # Who works on what

    def own_parts(self, op: Op) -> list[slice]:
        """Each rank's elements, cut axis by axis."""
        return [self.cut(op, rank, op.region.shard) for rank in range(self.world)]

    def wholes(self, op: Op) -> list[slice]:
        """Each rank's elements once an all-gather has joined them."""
        kept = max(0, len(op.region.shard) - len(op.axes))
        return [self.cut(op, rank, op.region.shard[:kept]) for rank in range(self.world)]

    def cut(self, op: Op, rank: int, shard: Sequence[str]) -> slice:
        start, stop = op.region.start, op.region.stop
        if not 0 <= start <= stop:
            raise WrongError(f"no such elements at {op}")
        places = dict(zip(self.topology.names, self.topology.coordinates(rank), strict=True))
        sizes: Mapping[str, int] = dict(self.topology.axes)
        for axis in shard:
            if (stop - start) % sizes[axis]:
                raise WrongError(f"unequal chunks at {op}")
            length = (stop - start) // sizes[axis]
            start += places[axis] * length
            stop = start + length
        return slice(start, stop)

    def chunk_in_group(self, op: Op, rank: int, part: slice) -> slice:
        """The chunk of a rank in a collective: groups are in ascending order."""
        group = self.topology.group(op.axes, rank)
        if (part.stop - part.start) % len(group):
            raise WrongError(f"unequal chunks at {op}")
        length = (part.stop - part.start) // len(group)
        start = part.start + group.index(rank) * length
        return slice(start, start + length)

    def scribble(self, op: Op) -> None:
        """What an operation works on is anything until it has ended, and beyond for the chunks of
        others."""
        memory = self.memory[op.bucket, op.region.buffer]
        parts = self.wholes(op) if op.kind == "all_gather" else self.own_parts(op)
        for rank, part in enumerate(parts):
            memory[rank, part] = self.rng.integers(0, PRIME, part.stop - part.start)

    # Results

    def expect(self, bucket: int, rank: int, part: slice, got: Residues) -> None:
        numel = self.schedule.plan.buckets[bucket].numel
        columns = np.arange(part.start, min(part.stop, numel))
        if self.is_mean:
            total = (self.packed[bucket] + self.late[bucket]).sum(axis=0) % PRIME
            due = total[columns] * inverse(self.world) % PRIME
        else:
            due = self.packed[bucket][self.owners[bucket][columns], columns]
        if (got[: len(columns)] != due).any():
            raise WrongError(f"rank {rank} ends with a wrong bucket {bucket}")

    def check_results(self) -> None:
        for b, rank, part in self.views:
            self.expect(b, rank, part, self.memory[b, "bucket"][rank, part])
        for b, counts in enumerate(self.handed_out):
            counts = counts[:, : self.schedule.plan.buckets[b].numel]
            sharded = self.schedule.result == "sharded_mean"
            right = counts.sum(axis=0) == 1 if sharded else counts == 1
            if not right.all():
                raise WrongError(f"bucket {b} is handed out {counts.tolist()} times")


def inverse(number: int) -> int:
    return pow(number, -1, PRIME)


_HANDLERS: dict[str, Callable[[_Run, Op, list[Residues]], None]] = {
    kind: getattr(_Run, kind)
    for kind in ("pack", "all_reduce", "reduce_scatter", "all_gather", "add", "gather", "unpack")
}
