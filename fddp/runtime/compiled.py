"""Programs compiled for one transport: lists of instructions for the executor.

A step runs three lists, in the order of the schedule: the operations before the control word, those
up to the first that depends on its sum, and the rest. The last list depends on the sum: most steps
have nothing to repair. See [Note: one executor] in csrc/step/executor.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, TypeVar

import torch

from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import ControlWord, decode, encode
from fddp.core.protocol.launch import LAUNCHED
from fddp.native import extension
from fddp.native.executor import (
    NativeConstants,
    NativeInstr,
    NativeInstrs,
    collectives_of_one,
    instr_type,
    instrs,
)
from fddp.runtime import operations
from fddp.runtime.hook_binding import BoundHook
from fddp.runtime.partial_sums import launch_rows
from fddp.runtime.program import Instruction, Program
from fddp.runtime.step_context import FirstLists, ListKey, RegularWord
from fddp.transport.base import Transport

_MOST_KEPT = 8  # lists and words of a program


Key = TypeVar("Key")
Value = TypeVar("Value")


class CompiledProgram:
    """Instructions of a program.

    Args:
        program: the program.
        transport: transport of the collectives.
        hook: the communication hook, bound to the program, if there is one.
    """

    def __init__(self, program: Program, transport: Transport, hook: BoundHook | None) -> None:
        self.program = program
        self.hook = hook
        self.collectives = transport.native_collectives()
        self._first: dict[ListKey, FirstLists] = {}
        self._rests: dict[ListKey, NativeInstrs] = {}
        self._words: dict[tuple[Method, float], RegularWord] = {}
        schedule = program.schedule
        self.is_native = (
            hook is None
            and transport.control_device.type == "cpu"
            and all(bucket.device == "cpu" for bucket in program.buckets)
        )
        gathers = schedule.result == "replicated"  # packs shards
        self.packs_natively = self.is_native and not gathers
        plan = program.plan
        has_local = len(plan.order) < sum(leaf.reducible for leaf in plan.leaves)
        self.has_views = (
            schedule.result == "replicated_mean"
            and not has_local
            and all(bucket.is_view and not bucket.sparse for bucket in program.buckets)
        )
        self.has_regular_words = (
            hook is None
            and transport.control_device.type == "cpu"
            and schedule.virtual is None
            and not gathers
            and schedule.scaling != "after"
        )

    @cached_property
    def constants(self) -> NativeConstants:
        """Constants of the program in the extension."""
        return _constants(self.program)

    def close(self) -> None:
        """Release the transport's memory; no further step may start."""
        self.collectives = collectives_of_one()

    # Lists

    def first_lists(self, key: ListKey) -> FirstLists:
        """Lists before the sum of the control words is known."""
        found = self._first.get(key)
        if found is None:
            before, after = (
                self._native(self._before(key), key),
                self._native(self._after(key), key),
            )
            found = _add(self._first, key, FirstLists(before, after))
        return found

    def rest(self, key: ListKey) -> NativeInstrs:
        """List once the sum of the control words is known."""
        found = self._rests.get(key)
        if found is None:
            found = _add(self._rests, key, self._native(self._rest(key), key))
        return found

    def _before(self, key: ListKey) -> Iterable[Instruction]:
        for instruction in self._unconditional(key):
            if instruction.op.kind == "control" and instruction.op.bucket < 0:
                return
            yield instruction
            if instruction.op.kind == "control":
                return

    def _after(self, key: ListKey) -> Iterable[Instruction]:
        has_word = False
        for instruction in self._unconditional(key):
            if instruction.needs_report:
                return
            has_word = has_word or instruction.op.kind == "control"
            if has_word and not (instruction.op.kind == "control" and instruction.op.bucket >= 0):
                yield instruction

    def _unconditional(self, key: ListKey) -> Iterable[Instruction]:
        """Operations of a step without repairs."""
        piggyback = self.program.schedule.piggyback_op
        for instruction in self.program.instructions:
            op = instruction.op
            if op.when != "always":
                continue
            if op.bucket in key.idle and op.kind != "control" and instruction.position != piggyback:
                continue
            yield instruction

    def _rest(self, key: ListKey) -> Iterable[Instruction]:
        done = {i.position for i in (*self._before(key), *self._after(key))}
        for instruction in self.program.instructions:
            op = instruction.op
            if instruction.position in done:
                continue
            if op.when != "always":
                applies = op.bucket in key.late
            elif op.bucket in key.idle:  # left out; with a gradient that came all the same, late
                applies = op.kind not in LAUNCHED and op.bucket in key.late
            else:
                applies = True
            if applies:
                yield instruction

    # Instructions

    def _native(self, chosen: Iterable[Instruction], key: ListKey) -> NativeInstrs:
        return instrs([self._bound(instruction, key) for instruction in chosen])

    def _bound(self, instruction: Instruction, key: ListKey) -> NativeInstr:
        position, op = instruction.position, instruction.op
        start, stop = self.program.extents[position]
        if op.kind == "pack":
            kind = "pack" if op.when == "always" else "call"
            return make_instr(instruction, kind, _at(operations.pack, position))
        if op.kind == "control":
            if op.bucket >= 0:  # written by `finish.send_word` once the list has ended
                return make_instr(instruction, "await")
            if self.is_native:
                return make_instr(instruction, "reduce")
            return make_instr(instruction, "start", _at(operations.launch_word, position))
        if op.kind in LAUNCHED:
            if position == self.program.schedule.piggyback_op:
                start, stop = op.region.start, self.program.buckets[op.bucket].buffer_numel
            if self._reduces_natively(instruction, key):
                return make_instr(instruction, "reduce", start=start, stop=stop)
            return make_instr(instruction, "start", self._launch_call(position))
        if op.kind == "unpack":
            if key.views or self.program.buckets[op.bucket].sparse:
                return make_instr(instruction, "await")
            return make_instr(instruction, "call", _at(operations.unpack, position))
        run = {"add": operations.add_repair, "gather": operations.gather}[op.kind]
        return make_instr(instruction, "call", _at(run, position))

    def _reduces_natively(self, instruction: Instruction, key: ListKey) -> bool:
        op, schedule = instruction.op, self.program.schedule
        return (
            self.is_native
            and op.kind == "all_reduce"
            and op.axes == tuple(name for name, _ in schedule.topology.axes)
            and op.region.buffer != "repair"
            and not (key.timed or op.bucket in key.idle)
        )

    def _launch_call(self, position: int) -> Callable[..., Any]:
        if self.hook is not None:
            return _at(operations.launch_hook, position)
        tree = self.program.trees.get(position)
        if tree is not None and tree.width > 1:
            return _at(launch_rows, position)
        return _at(operations.launch, position)

    # Control words

    def regular_word(self, method: Method, weight: float) -> RegularWord:
        """Return the control word of a rank that contributes all gradients, with the report of the
        sum of such words."""
        found = self._words.get((method, weight))
        if found is None:
            found = _add(self._words, (method, weight), _regular_word(self.program, method, weight))
        return found


def _add(kept: dict[Key, Value], key: Key, value: Value) -> Value:
    if len(kept) >= _MOST_KEPT:
        kept.clear()
    kept[key] = value
    return value


def _constants(program: Program) -> NativeConstants:
    """Return the constants of a program."""
    module, schedule = extension.load(), program.schedule
    buckets = [
        module.StepBucket(
            bucket.leaves,
            bucket.layout.native,
            program.packings[bucket.index],
            bucket.padded_numel,
            bucket.max_safe_magnitude,
            bucket.index in schedule.retained,
            bucket.text,
        )
        for bucket in program.buckets
    ]
    return NativeConstants(
        module.StepConstants(
            buckets,
            positions=len(schedule.ops),
            leaves=len(program.plan.leaves),
            last_bucket=schedule.sequence[-1] if schedule.sequence else -1,
            world_size=schedule.topology.world_size,
            average=schedule.scaling == "average",
            limb_bits=program.control.limb_bits,
            limbs=program.control.fields["fingerprint"].stop,
        )
    )


def _at(run: Callable[..., Any], position: int) -> Callable[..., Any]:
    def call(step: Any, *further: Any) -> Any:
        return run(step, position, *further)

    return call


def make_instr(
    instruction: Instruction,
    kind: str,
    call: Callable[..., Any] | None = None,
    *,
    start: int = 0,
    stop: int = 0,
) -> NativeInstr:
    op = instruction.op
    awaited = instruction.awaited
    return instr_type()(kind, instruction.position, op.bucket, start, stop, awaited, call)


def _regular_word(program: Program, method: Method, weight: float) -> RegularWord:
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
    return RegularWord(torch.from_numpy(vector), report)
