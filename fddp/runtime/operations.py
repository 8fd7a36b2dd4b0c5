"""Operations of a step that run in Python.

Each is a function of the step and the position of the operation in the schedule. Those that start a
collective also receive whether the caller waits for it next. `start` is the one place at which the
kind of an operation selects a collective of the transport. Operators on tensors
(`collectives/execute.py`) and measurements (`sync/measure.py`) use it, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fddp.core.protocol.launch import TraceAction
from fddp.core.schedule.op import Kind, Op
from fddp.core.schedule.sum_tree import SumTree
from fddp.errors import InternalError
from fddp.native.pack import pack_
from fddp.runtime.contributions import Packed, pack_bucket_
from fddp.runtime.failures import pack_error
from fddp.runtime.hook_sums import HookSums, StageWork
from fddp.runtime.program import BucketProgram
from fddp.runtime.sparse import SparseForm
from fddp.runtime.step import Step
from fddp.transport.base import Axes, Transport, Work
from fddp.transport.operation import OperationKind

if TYPE_CHECKING:
    from fddp._C import CollectiveRange


def run(step: Step, position: int, wait_soon: bool) -> Any:
    """Run an operation. Return the work of a collective."""
    op = step.program.schedule.ops[position]
    if op.kind == "pack":
        return pack(step, position)
    if op.kind == "control":
        return step.transport.all_reduce(_word(step), wait_soon=True)
    if op.kind == "add":
        return add_repair(step, position)
    if op.kind == "gather":
        return gather(step, position)
    if op.kind == "unpack":
        return unpack(step, position)
    if step.code.hook is not None:
        return launch_hook(step, position, wait_soon)
    tree = step.program.trees.get(position)
    if tree is not None and tree.width > 1:
        return launch_rows(step, position, wait_soon)
    return launch(step, position, wait_soon)


def pack(step: Step, position: int) -> None:
    """Write this rank's contribution into its buffer, with zeros for missing gradients."""
    op = step.program.schedule.ops[position]
    bucket = step.program.buckets[op.bucket]
    if op.region.buffer == "repair":
        buffer = step.repairs[op.bucket] = step.pool.acquire(
            bucket.index, bucket.buffer_numel, bucket.wire_dtype, step.devices[bucket.device]
        )
    else:
        buffer = step.memory(op.bucket)
    if bucket.numel < bucket.padded_numel:
        buffer[bucket.numel : bucket.padded_numel].zero_()
    try:
        packed = _write(step, buffer, position)
        if not packed.peak <= bucket.max_safe_magnitude:
            _note_magnitude(step, buffer, packed, op)
    except Exception as error:
        if step.report is not None:
            raise  # too late to report it in the control word
        fail_pack(step, position, error)
    if step.record_time:
        _log_packed(step, op)


def fail_pack(step: Step, position: int, error: Exception) -> None:
    """Fail the step on this rank, whose contribution can't be packed, and pack zeros."""
    bucket = step.program.schedule.ops[position].bucket
    buffer = step.memory(bucket)
    step.fail(pack_error(step.program, bucket, buffer, step.source, error))
    _write(step, buffer, position)


def unpack(step: Step, position: int) -> None:
    """Turn the reduced buffer into results; views of it if no cast or factor is needed."""
    bucket = step.program.schedule.ops[position].bucket
    step.results.unpack(position, bucket, step.memory(bucket), step.after)


def launch(step: Step, position: int, wait_soon: bool) -> Work:
    """Start the collective of an operation on its part of the buffer."""
    op = step.program.schedule.ops[position]
    own = operand(step, position)
    work = step.works[op.bucket] = start(
        step.transport,
        op.kind,
        own,
        axes=op.axes,
        average=step.sums.averages,
        tree=step.program.trees.get(position),
        record_time=step.record_time,
        wait_soon=wait_soon,
    )
    return work


def start(
    transport: Transport,
    kind: Kind | OperationKind,
    tensor: Tensor,
    *,
    axes: Axes = (),
    average: bool = False,
    tree: SumTree | None = None,
    src: int = 0,
    record_time: bool = False,
    wait_soon: bool = False,
) -> Work:
    """Start the collective of a kind, for steps and for operators.

    Args:
        kind: the collective. Each takes those of the other arguments that it has in `Transport`.
        tensor: written in place.
        axes, average, tree, src, record_time, wait_soon: as in the methods of `Transport`.
    """
    if kind == "all_reduce":
        return transport.all_reduce(
            tensor, axes=axes, average=average, record_time=record_time, wait_soon=wait_soon
        )
    if kind == "reduce_scatter":
        return transport.reduce_scatter(
            tensor,
            axes=axes,
            average=average,
            tree=tree,
            record_time=record_time,
            wait_soon=wait_soon,
        )
    if kind == "all_gather":
        return transport.all_gather_in_place(
            tensor, axes=axes, record_time=record_time, wait_soon=wait_soon
        )
    if kind == "all_to_all":
        return transport.all_to_all_in_place(
            tensor, axes=axes, record_time=record_time, wait_soon=wait_soon
        )
    if kind == "broadcast" and not axes:
        return transport.broadcast(tensor, src, record_time=record_time)
    raise InternalError(f"a transport has no collective {kind} along {axes}")


def _word(step: Step) -> Tensor:
    word = step.executor.word()
    if word is None:
        raise InternalError("the control word was sent before it was written")
    return word


def operand(step: Step, position: int) -> Tensor:
    """Tensor of a collective, including a piggybacked control word."""
    schedule = step.program.schedule
    op = schedule.ops[position]
    if position == schedule.piggyback_op and op.bucket in step.idle:
        return _word(step)  # the bucket is left out, and the word travels alone
    buffer = step.executor.buffer(op.bucket)
    memory = step.repairs.get(op.bucket) if op.region.buffer == "repair" else buffer
    if memory is None:
        raise InternalError(f"{op.kind} of bucket {op.bucket} before it was packed")
    start, stop = step.program.extents[position]
    return memory[start:] if position == schedule.piggyback_op else memory[start:stop]


def add_repair(step: Step, position: int) -> None:
    """Add the reduced late gradients to the reduced bucket."""
    op = step.program.schedule.ops[position]
    repair = step.repairs.get(op.bucket)
    if repair is None:
        raise InternalError(f"the repair of bucket {op.bucket} was added before it was packed")
    if step.executor.buffer(op.bucket) is None:  # the bucket was left out
        step.memory(op.bucket).zero_()
    start, stop = step.program.extents[position]
    step.memory(op.bucket)[start:stop].add_(repair[start:stop])


def gather(step: Step, position: int) -> None:
    """Sum the sparse gradients of all ranks."""
    op, report = step.program.schedule.ops[position], step.report
    bucket = step.program.buckets[op.bucket]
    if step.program.defers_report:
        total_weight = float(step.program.scale.ranks)  # every rank has weight 1
    elif report is None:
        raise InternalError("sparse gradients were gathered before the control word was read")
    else:
        total_weight = report.total_weight
    (leaf,) = bucket.leaves
    form = _sparse_form(step, bucket)
    if op.bucket in step.sparse:
        sources, total = step.sparse[op.bucket]
        _put_sparse(step, leaf, total.to(getattr(torch, form.spec.dtype)), sources)
        return
    parts = [(part.sources[0], part.weight / total_weight) for part in step.sources(op.bucket)]
    entry = step.recorder.launched(step.program.schedule, step.number, position)
    entry.note_wait()
    what = f"{bucket.text} of step {step.number}"
    gathered = form.gathered(step.program, parts, step.transport, what)
    entry.note_done()
    _put_sparse(step, leaf, gathered, [source for source, _ in parts])


def reduce_sparse(step: Step) -> None:
    """Let the hook reduce the sparse buckets that it takes, which are complete. The control word,
    which follows, reports an error of the hook."""
    sums, hook = step.sums, step.code.hook
    assert isinstance(sums, HookSums)
    assert hook is not None
    for op in step.program.schedule.ops:
        if op.kind != "gather" or op.bucket not in hook.specs or op.bucket in step.idle:
            continue
        bucket = step.program.buckets[op.bucket]
        parts = [(part.sources[0], part.weight) for part in step.sources(op.bucket)]
        scaled = [(grad, step.scale.before(w)) for grad, w in parts if grad is not None]
        own = _sparse_form(step, bucket).summed(scaled)
        what = f"{bucket.text} of step {step.number}"
        total = sums.reduce_sparse(op, own, step.source.weight, step.hook_states, what)
        step.sparse[op.bucket] = [grad for grad, _ in parts], total


def _sparse_form(step: Step, bucket: BucketProgram) -> SparseForm:
    (leaf,) = bucket.leaves
    return SparseForm(
        step.program.plan.leaves[leaf],
        step.program.schedule.wire_dtypes[bucket.index],
        step.devices[bucket.device],
    )


def _put_sparse(step: Step, leaf: int, total: Tensor, sources: list[Tensor | None]) -> None:
    step.results.put_sparse(leaf, total)
    if step.check is not None:
        step.check.gathered(leaf, sources)


def _write(step: Step, buffer: Tensor, position: int) -> Packed:
    op, program, source = step.program.schedule.ops[position], step.program, step.source
    chunk = program.shards.chunks.get(position)
    if chunk is not None:
        nothing: list[Tensor | None] = [None] * len(chunk.parts)
        shards = nothing if source.leaves is None else chunk.sources(source.leaves)
        return Packed(pack_(buffer, chunk.layout, shards), None)
    scale = step.scale
    if op.when != "always":
        scale = step.sums.repair_scale(step.contributions.weight)
    keeps, is_late = step.keeps_sources, op.when == "late"
    packed = pack_bucket_(
        source,
        program,
        op.bucket,
        buffer,
        scale,
        late=is_late,
        keeps_sources=keeps,
        sums_squares=step.measures_squares and op.when == "always",
    )
    if packed.squares is not None:
        step.squares[op.bucket] = packed.squares
    if step.earlier is None:
        return packed
    return packed._replace(peak=step.earlier.close(op.bucket, buffer, packed.peak))


def _note_magnitude(step: Step, buffer: Tensor, packed: Packed, op: Op) -> None:
    """Note a packed bucket with large, non-finite or unknown numbers."""
    if math.isnan(packed.peak) and step.check is None:
        return  # nobody asks, and the control word stays a regular one
    again, finite = op.when == "again", not math.isinf(packed.peak)
    step.executor.note_magnitude(finite)
    if step.check is not None:
        bucket = step.program.buckets[op.bucket]
        sources = packed.sources if step.earlier is None else step.earlier.sources(op.bucket)
        step.check.packed(bucket, buffer, sources, finite=finite, again=again)


def _log_packed(step: Step, op: Op) -> None:
    """Add a packed bucket to the step's trace."""
    if op.when != "always":
        step.log.append((step.arrived, TraceAction("repair", op.bucket)))
    elif op.region.start == 0:
        step.log.append((step.arrived, TraceAction("launch", op.bucket)))


def launch_hook(step: Step, position: int, wait_soon: bool) -> Any:
    """Start a stage of the hook's reduction, or an operation that the hook does not carry out."""
    op, sums = step.program.schedule.ops[position], step.sums
    assert isinstance(sums, HookSums)
    reduction = sums.reduction(position)
    if reduction is None:
        if op.when == "again":
            sums.discard(op.bucket)
        return launch(step, position, wait_soon)
    what = f"{step.program.buckets[op.bucket].text} of step {step.number}"
    own, weight = operand(step, position), step.source.weight
    work = sums.launch(reduction, own, weight, step.hook_states, what)
    started = step.works[op.bucket] = StageWork(sums, work, is_last=op.kind != "stage")
    return started


class RowsWork:
    """A reduce-scatter of several rows; see [Note: virtual ranks] in `core/schedule/virtual.py`.

    A rank sends one partial sum for each span of virtual ranks that it carries, as rows of one
    reduce-scatter, which adds them along the tree. Waiting for it copies the last sum to the
    buffer. What the buffer cannot hold stays in the step's scratch memory for the next reduction.

    Attributes:
        done_s: as `Work.done_s`.
    """

    def __init__(self, step: Step, position: int, memory: Tensor, work: Work) -> None:
        self._step, self._position = step, position
        self._memory, self._work = memory, work

    @property
    def done(self) -> bool:
        """True if `wait` would not block."""
        return self._work.done

    @property
    def done_s(self) -> float | None:
        """As `Work.done_s`."""
        return self._work.done_s

    def end_range(self, range: CollectiveRange) -> None:
        """As `Work.end_range`."""
        self._work.end_range(range)

    def wait(self, what: str) -> None:
        """Wait for the collective, and take its results out of the rows."""
        self._work.wait(what)
        step, position = self._step, self._position
        program = step.program
        tree, op = program.trees[position], program.schedule.ops[position]
        block = program.schedule.topology.size(op.region.shard)
        place, bucket = program.rank // block % len(tree.summands), op.bucket
        rows = self._memory.view(len(tree.summands), tree.width, -1)[place]
        start, stop = program.extents[position]
        start += place * ((stop - start) // len(tree.summands))
        stop = start + rows.shape[1]
        *before, last = rows[: tree.sums].unbind(0)
        step.memory(bucket)[start:stop].copy_(last)
        if before:
            # Keeps the memory from being reused.
            step.scratch["left", bucket, start, stop] = rows[: tree.sums - 1]
        step.pool.release(("rows", bucket, position), self._memory)


def launch_rows(step: Step, position: int, wait_soon: bool) -> RowsWork:
    """Start a reduce-scatter in which some rank has several summands, or keeps several sums."""
    op, tree = step.program.schedule.ops[position], step.program.trees[position]
    own = operand(step, position)
    key = ("rows", op.bucket, position)
    memory = step.pool.acquire(key, tree.width * own.numel(), own.dtype, own.device)
    rows = memory.view(len(tree.summands), tree.width, -1)
    for number, total in enumerate((*_before(step, position), own)):
        rows[:, number].copy_(total.view(len(tree.summands), -1))
    work = start(
        step.transport,
        op.kind,
        memory,
        axes=op.axes,
        tree=tree,
        record_time=step.record_time,
        wait_soon=wait_soon,
    )
    started = step.works[op.bucket] = RowsWork(step, position, memory, work)
    return started


def _before(step: Step, position: int) -> Iterable[Tensor]:
    """Partial sums of this rank but the one in the buffer."""
    program = step.program
    op = program.schedule.ops[position]
    start, stop = program.extents[position]
    if program.schedule.topology.size(op.region.shard) > 1:  # sums over ranks already
        left = step.scratch.pop(("left", op.bucket, start, stop), None)
        return () if left is None else left.unbind(0)
    spans = () if step.earlier is None else step.earlier.spans(op.bucket)
    return [span[start:stop] for span in spans]
