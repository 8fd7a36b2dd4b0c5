"""Programs of usual steps, for the compiled interpreter; see [Note: usual steps] in
csrc/step/usual_step.h."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fddp.core.numerics.weighting import WeightScale
from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import ControlReport, ControlWord, decode, encode
from fddp.native import extension
from fddp.native.usual_step import NativeProgram, StepSetup, step_setup
from fddp.runtime.program import Program
from fddp.transport.base import Transport, Work

_MOST_WORDS = 8  # kept per program


class UsualWord(NamedTuple):
    """Control word of a rank in a usual step, with a fingerprint of 0, and the report of its sum.

    Attributes:
        vector: elements of the word.
        report: report of the sum over ranks, for matching fingerprints.
    """

    vector: Tensor
    report: ControlReport


class UsualWords(dict[tuple[Method, float], UsualWord]):
    """Control words of steps in which every rank contributes all gradients: by the call, and by the
    weight of each rank. Made at the first access."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def __missing__(self, key: tuple[Method, float]) -> UsualWord:
        if len(self) == _MOST_WORDS:
            self.clear()
        self[key] = word = _usual_word(self._program, *key)
        return word


@dataclass(frozen=True)
class UsualProgram:
    """Program of usual steps.

    Attributes:
        setup: its compiled form.
        words: its control words.
        adopt: returns the `Work` for a collective in flight, from its compiled form.
    """

    setup: StepSetup
    words: UsualWords
    adopt: Callable[[Any], Work]

    @classmethod
    def of(cls, program: Program, transport: Transport) -> UsualProgram | None:
        """Compile a program; None if none of its steps is usual."""
        if not _is_suited(program):
            return None
        schedule = program.schedule
        # The weight of every rank is the unit of weight, so the unit does not matter.
        scale = WeightScale(schedule.topology.world_size, scaling=schedule.scaling)
        collectives = transport.native_collectives()
        setup = step_setup(_compiled(program), collectives, scale.before(1.0))
        return cls(setup, UsualWords(program), collectives.adopt)


def _is_suited(program: Program) -> bool:
    schedule = program.schedule
    axes = tuple(name for name, _ in schedule.topology.axes)
    return (
        program.is_plain
        and schedule.scaling != "after"
        and all(bucket.device == "cpu" for bucket in program.buckets)
        and not any(bucket.sparse for bucket in program.buckets)
        and all(i.op.kind in ("pack", "all_reduce", "control", "unpack") for i in program.usual)
        and all(i.op.axes == axes for i in program.usual if i.op.kind == "all_reduce")
    )


def _compiled(program: Program) -> NativeProgram:
    module, schedule, layout = extension.load(), program.schedule, program.control
    ops = []
    for position, op, awaited, needs_report in program.usual:
        start, stop = program.extents[position]
        if position == schedule.piggyback_op:
            start, stop = op.region.start, program.buckets[op.bucket].buffer_numel
        # Results that are no views of the buffer are left to Python.
        is_other = op.kind == "unpack" and not program.buckets[op.bucket].is_plain
        kind = "other" if is_other else op.kind
        ops.append(module.StepOp(kind, position, op.bucket, start, stop, awaited, needs_report))
    buckets = [
        module.StepBucket(
            bucket.leaves,
            bucket.layout.native,
            program.packing.native[bucket.index],
            bucket.padded_numel,
            bucket.max_safe_magnitude,
            bucket.index in schedule.retained,
            bucket.text,
        )
        for bucket in program.buckets
    ]
    return NativeProgram(
        module.StepProgram(
            ops,
            buckets,
            positions=len(schedule.ops),
            leaves=len(program.plan.leaves),
            carrier_op=schedule.piggyback_op if schedule.piggyback_op >= 0 else schedule.control,
            last_bucket=schedule.sequence[-1],
            world_size=schedule.topology.world_size,
            average=schedule.scaling == "average",
            limb_bits=layout.limb_bits,
            limbs=layout.fields["fingerprint"].stop,
        )
    )


def _usual_word(program: Program, method: Method, weight: float) -> UsualWord:
    layout, ranks = program.control, program.schedule.topology.world_size
    word = ControlWord(
        fingerprint=0,
        weight=weight,
        used=[True] * layout.leaves,
        late=[False] * layout.buckets,
        method=method,
    )
    vector = encode(layout, word)
    report = decode(layout, vector * ranks, fingerprint=0, world_size=ranks)
    return UsualWord(torch.from_numpy(vector), report)
