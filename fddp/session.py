"""One synchronisation on one rank: carries a schedule out, operation by operation.

A session is opened before the gradients exist and walks through the schedule's operations as far
as readiness allows: a bucket is packed and sent when it is full and all before it have gone. From
the end of backward on it runs to the end of the schedule.

[Note: a rank that fails]
What one rank alone can see (an exception in its loss function, a bad weight, a wrong tree) must not
leave the others waiting. The session notes the failure, contributes zeros from then on, finishes
the collectives that are the same on all ranks whatever happened, and tells through the control
word. Then all ranks exchange what went wrong and raise; no collective is left half done, so the
group stays usable. Only an error of the transport itself ends a session at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from fddp.buffers import BufferPool
from fddp.contributions import NOTHING, Contributions
from fddp.control import ControlReport, ControlWord, decode, encode
from fddp.errors import (
    DesyncError,
    FddpError,
    InternalError,
    PeerError,
    TreeMismatchError,
    WeightError,
)
from fddp.pack import Stats, scale_, slices, unpack_
from fddp.program import Program
from fddp.reducer import Action
from fddp.scaling import WeightScale
from fddp.schedule import Op
from fddp.sparse import gather_sparse
from fddp.transports.base import Transport, Work

_BACKWARD = frozenset({"pack", "all_reduce"})


class Outcome(NamedTuple):
    """What a session ends with.

    Attributes:
        leaves: the synchronised gradients, by leaf; local ones for leaves that are not reduced.
        report: what the control word said.
        stats: squared norm and finiteness of the synchronised gradients; None unless asked for.
    """

    leaves: list[Tensor | None]
    report: ControlReport
    stats: Stats | None


@dataclass
class BucketState:
    """A bucket's fate in one step; times on the clock of `time.perf_counter`."""

    buffer: Tensor | None = None
    repair: Tensor | None = None
    ready_s: float = math.inf  # infinite until its gradients are there
    launch_s: float = math.nan
    work: Work | None = None


@dataclass(frozen=True)
class Setting:
    """What a session gets from its `GradSync`.

    Attributes:
        program: what to execute.
        transport: carries the collectives.
        pool: memory for buckets.
        scale: the agreed unit of weight.
        step: number of this synchronisation.
        with_stats: whether times, norm and finiteness are wanted.
    """

    program: Program
    transport: Transport
    pool: BufferPool
    scale: WeightScale
    step: int
    with_stats: bool


@dataclass
class Session:
    """Runs one synchronisation; see the module's text.

    Attributes:
        setting: what does not change during the session.
        contributions: what this rank brings; nothing until it is set.
        has_next: whether this rank has input for another step.
        failure: what went wrong on this rank.
        orderly: whether the step ended, well or not, with all collectives done.
        report: what the control word said, once it is in.
        log: what was done, each with the number of gradients that had arrived by then.
        buckets: how far each bucket is.
    """

    setting: Setting
    contributions: Contributions = NOTHING
    has_next: bool = True
    failure: BaseException | None = None
    orderly: bool = False
    report: ControlReport | None = None
    log: list[tuple[int, Action]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._program = self.setting.program
        self._ops = self._program.schedule.ops
        self._cursor = 0
        self._ended = False
        self._lock = threading.RLock()
        self.buckets = [BucketState() for _ in self._program.plan.buckets]
        self._works: dict[int, Work] = {}
        self._broken: BaseException | None = None
        self._finite = True
        self._control: Tensor | None = None
        self._leaves: list[Tensor | None] = [None] * len(self._program.plan.leaves)
        self._stats = Stats(0.0, True)
        self._told = ""  # what the others are told of the failure
        self._devices: dict[str, torch.device] = {}

    # Events

    def begin(self, contributions: Contributions, leaves: Sequence[Tensor | None]) -> None:
        """Sets what this rank brings; `leaves` show on which devices the buckets belong."""
        self.contributions = contributions
        for bucket in self._program.plan.buckets:
            if bucket.device not in self._devices:
                leaf = leaves[bucket.leaves[0]]
                if leaf is not None:
                    self._devices[bucket.device] = leaf.device

    def buffer_of(self, bucket: int) -> Tensor:
        """The memory of a dense bucket, from the pool."""
        state = self.buckets[bucket]
        if state.buffer is None:
            state.buffer = self._buffer(bucket)
        return state.buffer

    def bucket_ready(self, bucket: int) -> None:
        """All gradients of a bucket are there. Never raises: backward must run to its end."""
        self.buckets[bucket].ready_s = time.perf_counter()
        try:
            self._advance()
        except BaseException as error:
            self._broken = self._broken or error

    def fail(self, error: BaseException) -> None:
        """This rank can't contribute; see [Note: a rank that fails]."""
        if self.failure is not None:
            return
        self.failure = error
        self._told = _text(error)
        if isinstance(error, FddpError):
            rank, step = self.setting.transport.rank, self.setting.step
            error.args = (f"rank {rank} at step {step}: {error}", *error.args[1:])

    def finish(self) -> Outcome:
        """Backward has ended, or there was none: runs the rest of the schedule.

        Raises:
            BaseException: this rank's own failure, once the step's collectives are done.
            PeerError: another rank failed.
            WeightError: the total weight over ranks is zero.
            DesyncError: ranks are at different steps, or run different plans.
            RankLostError, SyncTimeoutError: the transport failed.
        """
        now = time.perf_counter()
        for state in self.buckets:
            state.ready_s = min(state.ready_s, now)
        self._ended = True
        if self._broken is not None:
            self._raise(self._broken)
        self._advance()
        for bucket, state in enumerate(self.buckets):
            if state.buffer is not None:
                self.setting.pool.lend(bucket, state.buffer)
        self.orderly = True
        self.log.append((self.contributions.arrived(), Action("finish")))
        stats = self._stats if self.setting.with_stats else None
        return Outcome(self._leaves, self._known(), stats)

    # The interpreter

    def _advance(self) -> None:
        with self._lock:
            while self._cursor < len(self._ops):
                op = self._ops[self._cursor]
                if not self._may_run(op):
                    return
                position = self._cursor
                # Moved on first: a gradient that arrives while this runs must not run it again.
                self._cursor += 1
                if self._applies(op):
                    self._run(position, op)

    def _may_run(self, op: Op) -> bool:
        if self._ended:
            return True
        if op.kind not in _BACKWARD or op.when != "always":
            return False
        is_last = op.bucket == self._program.schedule.sequence[-1]
        return not is_last and self.buckets[op.bucket].ready_s < math.inf

    def _applies(self, op: Op) -> bool:
        if op.when == "always":
            return True
        late = op.bucket in self._known().late
        if op.when == "late":
            return late
        report = self._known()
        return late or not self.setting.scale.keeps_range(report.total_weight, report.active)

    def _run(self, position: int, op: Op) -> None:
        for dep in op.deps:
            self._wait(dep)
        _HANDLERS[op.kind](self, position, op)

    def _wait(self, position: int) -> None:
        """Waits for an operation; for one that was skipped, for what it would have waited for."""
        work = self._works.get(position)
        op = self._ops[position]
        if work is not None:
            work.wait(f"{self._what(op)} of step {self.setting.step}")
        elif op.when != "always":
            for dep in op.deps:
                self._wait(dep)

    def _what(self, op: Op) -> str:
        return "the control word" if op.kind == "control" else self._program.describe(op.bucket)

    # Operations

    def _pack(self, position: int, op: Op) -> None:
        state = self.buckets[op.bucket]
        if op.when == "late":
            state.repair = self._buffer(op.bucket)
            self._fill(state.repair, op.bucket, self.contributions.pack_late_)
        else:
            self._fill(self.buffer_of(op.bucket), op.bucket, self.contributions.pack_)
        if op.when != "always":
            self.log.append((self.contributions.arrived(), Action("repair", op.bucket)))

    def _fill(self, buffer: Tensor, bucket: int, pack: Callable[..., bool]) -> None:
        layout, scale = self._program.layouts[bucket], self._scale(bucket)
        pack = NOTHING.pack_ if self.failure else pack
        try:
            finite = pack(bucket, buffer, layout, scale)
            self._finite = self._finite and finite
        except Exception as error:
            if self.report is not None:
                raise  # too late to tell the others through the control word
            self.fail(self._blamed(bucket, buffer, error))
            NOTHING.pack_(bucket, buffer, layout, scale)

    def _blamed(self, bucket: int, buffer: Tensor, error: Exception) -> Exception:
        """What can't be packed, by path."""
        problem = TreeMismatchError(f"{self._program.describe(bucket)} can't be packed: {error}")
        problem.__cause__ = error
        for part in self.contributions.parts(bucket):
            for leaf, source in zip(
                self._program.plan.buckets[bucket].leaves, part.sources, strict=True
            ):
                if source is not None and source.device != buffer.device:
                    return TreeMismatchError(
                        f"the gradient of leaf {self._program.paths[leaf]!r} is on {source.device} "
                        f"where its bucket is on {buffer.device}; move it there"
                    )
        return problem

    def _all_reduce(self, position: int, op: Op) -> None:
        state = self.buckets[op.bucket]
        buffer = state.repair if op.buffer == "repair" else state.buffer
        if buffer is None:
            raise InternalError(f"operation {position} reduces a buffer that was never packed")
        state.launch_s = time.perf_counter() if op.when == "always" else state.launch_s
        state.work = self._works[position] = self.setting.transport.all_reduce(
            buffer, stamp=self.setting.with_stats
        )
        if op.when == "always":
            self.log.append((self.contributions.arrived(), Action("launch", op.bucket)))

    def _add(self, position: int, op: Op) -> None:
        state = self.buckets[op.bucket]
        if state.buffer is None or state.repair is None:
            raise InternalError(f"operation {position} adds a repair that was never reduced")
        state.buffer.add_(state.repair)

    def _send_control(self, position: int, op: Op) -> None:
        layout = self._program.control
        contributions = NOTHING if self.failure else self.contributions
        word = ControlWord(
            fingerprint=self._program.fingerprint(self.setting.step),
            weight=contributions.weight,
            used=contributions.used(self._program),
            late=contributions.late(self._program),
            has_next=self.has_next,
            nonfinite=not self._finite,
            failed=self.failure is not None,
            order=self._order() if layout.with_order else (),
        )
        device = self.setting.transport.control_device
        self._control = torch.from_numpy(encode(layout, word)).to(device)
        self._works[position] = self.setting.transport.all_reduce(self._control)
        self.log.append((self.contributions.arrived(), Action("control")))

    def _order(self) -> tuple[int, ...]:
        if self.setting.transport.rank != 0 or self.failure:
            return ()
        return tuple(self.contributions.order(self._program))

    def _gather(self, position: int, op: Op) -> None:
        report = self._known()
        (leaf,) = self._program.plan.buckets[op.bucket].leaves
        spec = self._program.plan.leaves[leaf]
        scale = self.setting.scale.exact(report.total_weight)
        parts = [
            (part.sources[0], scale.before(part.weight))
            for part in self.contributions.parts(op.bucket)
        ]
        self._leaves[leaf] = gather_sparse(
            spec,
            self._program.schedule.wire_dtypes[op.bucket],
            self._device(spec.device),
            [(source, factor) for source, factor in parts if source is not None],
            self.setting.transport,
            f"{self._what(op)} of step {self.setting.step}",
        )

    def _unpack(self, position: int, op: Op) -> None:
        report = self._known()
        bucket = self._program.plan.buckets[op.bucket]
        used = [report.used[slot] for slot in self._program.bucket_slots[op.bucket]]
        if bucket.sparse:
            results: Sequence[Tensor | None] = [self._leaves[leaf] for leaf in bucket.leaves]
            stats = _sparse_stats(results[0])
        else:
            after = self._scale(op.bucket).after(report.total_weight)
            results, stats = self._results(op.bucket, after)
        for leaf, result, flag in zip(bucket.leaves, results, used, strict=True):
            self._leaves[leaf] = result if flag else None
        sq_norm, finite = self._stats
        self._stats = Stats(sq_norm + stats.sq_norm, finite and stats.finite)

    def _results(self, bucket: int, after: float) -> tuple[Sequence[Tensor | None], Stats]:
        """Results of a dense bucket over its own memory, or in new memory where a cast is due."""
        buffer = self.buckets[bucket].buffer
        assert buffer is not None
        layout = self._program.layouts[bucket]
        dtype = getattr(torch, self._program.plan.buckets[bucket].dtype)
        if buffer.dtype == dtype:
            stats = Stats(0.0, True)
            if after != 1.0 or self.setting.with_stats:
                stats = scale_(buffer, after, stats=self.setting.with_stats)
            return slices(buffer, layout), stats
        results = slices(torch.empty(layout.numel, dtype=dtype, device=buffer.device), layout)
        return results, unpack_(results, layout, buffer, after, stats=self.setting.with_stats)

    # What the control word says

    def _known(self) -> ControlReport:
        if self.report is None:
            self.report = report = self._read_control()
            if not report.agreed or report.failed or self._weight_problem(report):
                self._give_up(report)
            for leaf in self._program.plan.local:
                self._leaves[leaf] = self.contributions.local(leaf)
        return self.report

    def _read_control(self) -> ControlReport:
        position = next(i for i, op in enumerate(self._ops) if op.kind == "control")
        self._wait(position)
        if self._control is None:
            raise InternalError("the control word was read before it was sent")
        transport = self.setting.transport
        return decode(
            self._program.control,
            self._control.cpu().numpy(),
            fingerprint=self._program.fingerprint(self.setting.step),
            world_size=transport.world_size,
        )

    def _give_up(self, report: ControlReport) -> None:
        """Raises on every rank, after the collectives in flight."""
        for position in list(self._works):
            self._wait(position)
        transport, step = self.setting.transport, self.setting.step
        if not report.agreed or report.failed:
            own = f"{step}\n{self._program.schedule.plan_digest}\n{self._told}"
            payload = own.encode(errors="backslashreplace")
            told = [text.decode() for text in transport.exchange(payload)]
            self.orderly = True
            if not report.agreed:
                raise DesyncError(_desync_message(transport.rank, told)) from self.failure
            if self.failure is not None:
                self._raise(self.failure)
            failures = {r: t.split("\n", 2)[2] for r, t in enumerate(told)}
            raise _peer_error(step, {r: text for r, text in failures.items() if text})
        self.orderly = True
        raise WeightError(f"step {step}: {self._weight_problem(report)}")

    def _raise(self, error: BaseException) -> NoReturn:
        """Lets go of an error while raising it: its traceback leads back here, and would keep the
        step's tensors until the garbage collector runs."""
        self.failure = self._broken = None
        try:
            raise error
        finally:
            del error

    def _weight_problem(self, report: ControlReport) -> str | None:
        """Why the weights of all ranks have no mean, or None."""
        ranks, total = self.setting.transport.world_size, report.total_weight
        if total <= 0.0:
            return (
                f"the total weight over {ranks} ranks is {total}, so there is no mean; give at "
                f"least one rank a weight above 0, or skip the step on all of them"
            )
        if not self.setting.scale.bears(total, report.active):
            return (
                f"the mean weight is {total / report.active} where sums were scaled for "
                f"{self.setting.scale.unit}, and a jump by more than 2**40 can't be corrected; the "
                f"next step is scaled for the new weights: call it again"
            )
        return None

    # Helpers

    def _scale(self, bucket: int) -> WeightScale:
        """The agreed scale, or the exact one for a bucket that is reduced again."""
        scale = self.setting.scale
        if self.report is not None and bucket in self._program.schedule.retained:
            report = self.report
            if not scale.keeps_range(report.total_weight, report.active):
                return scale.exact(report.total_weight)
        return scale

    def _buffer(self, bucket: int) -> Tensor:
        spec = self._program.plan.buckets[bucket]
        dtype = getattr(torch, self._program.schedule.wire_dtypes[bucket])
        return self.setting.pool.acquire(bucket, spec.numel, dtype, self._device(spec.device))

    def _device(self, label: str) -> torch.device:
        # A rank that has no gradient at all learns from the plan; "meta" plans run on the CPU.
        return self._devices.get(label) or torch.device(
            "cpu" if label == "meta" else label.partition("#")[0]
        )


_HANDLERS: dict[str, Callable[[Session, int, Op], None]] = {
    "pack": Session._pack,
    "all_reduce": Session._all_reduce,
    "add": Session._add,
    "control": Session._send_control,
    "gather": Session._gather,
    "unpack": Session._unpack,
}


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an error that can't be printed must not keep the others waiting
        return type(error).__name__


def _peer_error(step: int, failures: dict[int, str]) -> PeerError:
    lines = [f"rank {rank} failed at step {step}: {text}" for rank, text in failures.items()]
    advice = "no gradients were produced on any rank; the group is in step and can go on"
    return PeerError("; ".join([*lines, advice]), failures)


def _desync_message(rank: int, told: list[str]) -> str:
    states = [text.split("\n", 2) for text in told]
    other = next(r for r, state in enumerate(states) if state[:2] != states[rank][:2])
    mine, theirs = states[rank], states[other]
    return (
        f"rank {rank} is at step {mine[0]} with plan {mine[1][:12]}, rank {other} at step "
        f"{theirs[0]} with plan {theirs[1][:12]}; every rank must synchronise equally often with "
        f"one GradSync (fddp.uneven does this for loops of unequal length)"
    )


def _sparse_stats(result: Tensor | None) -> Stats:
    if result is None:
        return Stats(0.0, True)
    values = result._values()
    norm = float(
        torch.linalg.vector_norm(
            values.to(torch.complex128 if values.is_complex() else torch.float64)
        )
    )
    return Stats(norm * norm, bool(torch.isfinite(values).all()))
