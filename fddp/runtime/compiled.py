"""Programs compiled for one transport: the list of instructions that the executor walks.

Each operation of the schedule becomes one instruction, at the same position; see
[Note: one executor] in csrc/step/executor.h.
"""

from __future__ import annotations

import zlib
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import ControlReport, ControlWord, decode, encode
from fddp.core.protocol.launch import LAUNCHED
from fddp.core.schedule.op import Op
from fddp.native import extension
from fddp.native.capture import is_capturing
from fddp.runtime.hook_binding import BoundHook
from fddp.runtime.program import Program
from fddp.transport.base import Transport

if TYPE_CHECKING:
    from fddp._C import Collectives, Instr, StepProgram


class RegularWord(NamedTuple):
    """Control word of a rank that contributes all gradients with weight 1, with a fingerprint of 0.

    Attributes:
        vector: elements of the word.
        report: report of the sum of such words over ranks, for matching fingerprints.
    """

    vector: Tensor
    report: ControlReport


class CompiledProgram:
    """Program on one transport.

    Args:
        program: the program.
        transport: transport of the collectives.
        hook: the communication hook, bound to the program, if there is one.
        devices: devices of the leaves by label, as known; steps add theirs. Others, of a rank that
            fails before it has leaves, would be no part of the ranks' communicators.

    Attributes:
        collectives: all-reduces in the extension.
        is_on_cpu: True if all buckets are on the CPU.
        is_native: True if the extension sends the control word.
        packs_natively: True if it packs buckets, too.
        has_views: True if the results of a regular step are slices of the buffers.
        has_regular_words: True if `regular_word` describes regular steps.
        carrier_device: label of the device of the bucket that carries the control word, if the plan
            was made of tensors that are not there ("meta"); else "".
        accelerators: types of the devices of the buckets other than the CPU.
    """

    def __init__(
        self,
        program: Program,
        transport: Transport,
        hook: BoundHook | None,
        devices: dict[str, torch.device],
    ) -> None:
        self.program = program
        self.hook = hook
        self.devices = devices
        schedule, plan = program.schedule, program.plan
        self.is_on_cpu = all(bucket.device == "cpu" for bucket in program.buckets)
        types = {bucket.device.partition("#")[0] for bucket in program.buckets}
        self.accelerators = sorted(types - {"cpu", "meta"})
        self.collectives = transport.native_collectives(self.accelerators)
        self._transport = transport
        self.is_native = hook is None and transport.control_device.type == "cpu"
        is_mean = schedule.result != "replicated"  # else it gathers shards
        self.packs_natively = self.is_native and is_mean
        has_local = len(plan.order) < sum(leaf.reducible for leaf in plan.leaves)
        self.has_views = (
            schedule.result == "replicated_mean"
            and not has_local
            and all(bucket.is_view and not bucket.sparse for bucket in program.buckets)
        )
        self.has_regular_words = (
            self.packs_natively and schedule.virtual is None and schedule.scaling != "after"
        )
        carrier = schedule.ops[schedule.control].bucket
        label = program.buckets[carrier].device if carrier >= 0 else ""
        self.carrier_device = label if label.partition("#")[0] == "meta" else ""
        # Start of the fingerprints of steps, equal on all ranks with this program.
        self.seed = zlib.crc32(schedule.shared_digest.encode())
        self._words: dict[tuple[Method, bool], RegularWord] = {}

    @property
    def is_captured(self) -> bool:
        """True if what the caller issues is captured in a graph."""
        return any(map(is_capturing, self.accelerators))

    def close(self) -> None:
        """Release the transport's memory; no further step may start."""
        self.collectives = extension.compiled.CollectivesOfOne()

    @cached_property
    def captured_collectives(self) -> Collectives:
        """All-reduces of a step that is captured in a graph."""
        return self._transport.native_collectives(self.accelerators, captured=True)

    @cached_property
    def native(self) -> StepProgram:
        """The list of instructions, with constants, in the extension."""
        module, program, schedule = extension.compiled, self.program, self.program.schedule
        buckets = [
            module.StepBucket(
                bucket.leaves,
                bucket.layout.native,
                program.packings[bucket.index],
                bucket.padded_numel,
                bucket.index in schedule.retained,
                bucket.text,
            )
            for bucket in program.buckets
        ]
        piggyback, word = schedule.piggyback_op, program.control
        return module.StepProgram(
            [self._instr(position) for position in range(len(schedule.ops))],
            buckets,
            leaves=len(program.plan.leaves),
            last_bucket=schedule.sequence[-1] if schedule.sequence else -1,
            summed_word=piggyback if piggyback >= 0 else schedule.control,
            world_size=schedule.topology.world_size,
            average=schedule.scaling == "average",
            has_views=self.has_views,
            limb_bits=program.control.limb_bits,
            limbs=program.control.fields["fingerprint"].stop,
            defers_report=program.defers_report,
            compared=word.fields["squares"].start,
            word_title=f"fddp::all_reduce control word: {_size(word.size, word.format)}",
        )

    def _instr(self, position: int) -> Instr:
        program, schedule = self.program, self.program.schedule
        op, is_carrier = schedule.ops[position], position == schedule.piggyback_op
        start, stop = program.extents[position]
        if is_carrier:  # reduces the control word, too
            start, stop = op.region.start, program.buckets[op.bucket].buffer_numel
        kind: Literal["pack", "collect", "word", "unpack", "await", "call"] = "call"
        is_native = False
        if op.kind == "pack":
            kind, is_native = "pack", self.packs_natively and op.when == "always"
        elif op.kind == "control":
            kind, is_native = "word", self.is_native
        elif op.kind in LAUNCHED:
            kind, is_native = "collect", self.is_native and self._is_plain(op)
        elif op.kind == "unpack":
            kind = "await" if program.buckets[op.bucket].sparse else "unpack"
        guard: Literal["always", "unless idle", "if used", "late"] = "always"
        if op.when != "always":  # "late", or "again" of a retained bucket
            guard = "late"
        elif op.kind != "control" and not is_carrier:
            guard = "unless idle" if op.kind in LAUNCHED else "if used"
        needs_report = position >= program.first_repair or op.kind in ("gather", "unpack")
        return extension.compiled.Instr(
            kind=kind,
            guard=guard,
            is_native=is_native,
            needs_report=needs_report and not program.defers_report,
            bucket=op.bucket,
            start=start,
            stop=stop,
            waits=program.waits[position],
            title=self._title(position),
        )

    def _title(self, position: int) -> str:
        """Name of an operation in a profile."""
        op = self.program.schedule.ops[position]
        if op.kind == "control":
            return "fddp::control"
        bucket, (start, stop) = self.program.buckets[op.bucket], self.program.extents[position]
        title = f"fddp::{op.kind} bucket {op.bucket}" + (
            "" if op.when == "always" else f" ({op.when})"
        )
        if bucket.sparse:  # of which the size is not known before
            return title
        return f"{title}: {_size(stop - start, str(bucket.wire_dtype).removeprefix('torch.'))}"

    def _is_plain(self, op: Op) -> bool:
        """Return True for a sum of a bucket over all ranks, which the extension can start."""
        device = self.program.buckets[op.bucket].device.partition("#")[0]
        if not self.collectives.takes(torch.device(device)):
            return False
        axes = tuple(name for name, _ in self.program.schedule.topology.axes)
        return op.kind == "all_reduce" and op.axes == axes and op.region.buffer != "repair"

    def regular_word(self, method: Method, *, with_squares: bool = False) -> RegularWord:
        """Return the control word of a rank that contributes all gradients with weight 1, with the
        report of the sum of such words. `with_squares`: it has measured squared norms, and gets a
        word of its own to write them into."""
        found = self._words.get((method, with_squares))
        if found is None:
            layout, ranks = self.program.control, self.program.schedule.topology.world_size
            word = ControlWord(
                fingerprint=0,
                weight=1.0,
                used=[True] * layout.leaves,
                late=[False] * layout.buckets,
                method=method,
                squares=[0.0] * layout.groups if with_squares else (),
            )
            vector = encode(layout, word)
            report = decode(layout, vector * ranks, fingerprint=0, world_size=ranks)
            found = RegularWord(torch.from_numpy(vector), report)
            self._words[method, with_squares] = found
        return found._replace(vector=found.vector.clone()) if with_squares else found


def _size(numel: int, dtype: str) -> str:
    return f"{numel * getattr(torch, dtype).itemsize} bytes of {dtype}"
