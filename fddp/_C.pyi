"""Types of the compiled extension.

Import them under `TYPE_CHECKING`. At run time the extension is `fddp.native.extension.compiled`,
which checks that it fits the installed torch. The order is that of `csrc/module.cpp`.
"""

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any, Final, Literal, Protocol, type_check_only
from weakref import ReferenceType

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend  # `dist.Backend` is a name

torch_version: Final[str]  # that it was built for, without the suffix after "+"

# tensor/layout.cpp

class Layout:
    """Slices of a flat buffer; see `fddp.native.layout.Layout`."""

    def __init__(
        self,
        offsets: Sequence[int],
        shapes: Sequence[Sequence[int]],
        strides: Sequence[Sequence[int]],
        numel: int,
    ) -> None: ...
    def __len__(self) -> int: ...

# tensor/operands.cpp

class Operands:
    """Signature of the leaves that a program was prepared for. The arguments are by leaf, None
    where a leaf is None."""

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype | None],
        devices: Sequence[torch.device | None],
    ) -> None: ...
    def matches(self, leaves: list[Any]) -> bool:
        """Return True if the leaves are dense tensors of the same shapes, dtypes and devices, and
        None where None was."""

def first_without_memory(leaves: Sequence[Any]) -> int:
    """Return the position of the first tensor whose own memory does not hold its values, or -1:
    those of transforms and tracers, of classes with a dispatch of their own, nested, quantized and
    zero tensors."""

def have_derivatives(leaves: Sequence[Any], graphs: bool) -> bool:
    """Return True if a leaf has a forward-mode tangent or, with `graphs`, requires a gradient."""

# tensor/pack.cpp: the functions of `fddp.native.pack`, for the CPU and, as `foreach_`, any device

def pack_(
    buffer: Tensor,
    layout: Layout,
    sources: Sequence[Tensor | None],
    scale: float,
    squares: Tensor | None = None,
) -> float: ...
def pack_add_(
    buffer: Tensor,
    layout: Layout,
    sources: Sequence[Tensor | None],
    scale: float,
    squares: Tensor | None = None,
) -> float: ...
def scale_(buffer: Tensor, scale: float) -> tuple[float, bool]: ...
def unpack_(
    outputs: Sequence[Tensor | None], layout: Layout, buffer: Tensor, scale: float
) -> tuple[float, bool]: ...
def foreach_pack_(
    buffer: Tensor, layout: Layout, sources: Sequence[Tensor | None], scale: float
) -> None: ...
def foreach_pack_add_(
    buffer: Tensor, layout: Layout, sources: Sequence[Tensor | None], scale: float
) -> None: ...
def foreach_unpack_(
    outputs: Sequence[Tensor | None], layout: Layout, buffer: Tensor, scale: float
) -> None: ...

# tensor/storage.cpp

class LiveViews:
    """Buffers, of which slices may be in use."""

    def __init__(self) -> None: ...
    def add(self, buffer: Tensor) -> None: ...
    def contains(self, tensor: Tensor) -> bool:
        """Return True if a tensor is a slice of one of the buffers."""

    def held_bytes(self, released: Sequence[Tensor]) -> int:
        """Return the bytes of the buffers that are in memory, without those among `released` that
        have no other owner."""

def slices(buffer: Tensor, layout: Layout) -> list[Tensor]: ...
def invalidate(tensors: Sequence[Tensor], error_text: str) -> None:
    """Detach slices from their memory. Any later use of one raises a RuntimeError."""

def storage_use_count(tensor: Tensor) -> int:
    """Return the number of owners of a tensor's memory: tensors, views, slices, storage objects. If
    it is 1, the memory may be reused."""

# tensor/released_buffers.cpp

class ReleasedBuffers:
    """Buffers that were released under one key of a pool. Those that are taken can be used on the
    current stream."""

    def __init__(self) -> None: ...
    def add(self, buffer: Tensor) -> None: ...
    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Take the first buffer of this form whose memory has no other owner, if there is one."""

    def take_last(self) -> Tensor | None:
        """Take the buffer that was released last, and drop the others."""

    def trim(self) -> None:
        """Drop the buffers whose memory has no other owner."""

    def buffers(self) -> list[Tensor]: ...

# autograd/backward_watch.cpp; see [Note: the end of backward]

@type_check_only
class Gate(Protocol):
    """Switch for all backward passes."""

    is_on: bool

@type_check_only
class PassHandler(Protocol):
    """Receiver of the events that a `BackwardWatch` observes."""

    def on_first_grad(self, context: int | None) -> None:
        """Open a step, before the gradient is accumulated, in a context of distributed autograd if
        one is given. Must not raise."""

    def on_abort(self) -> None:
        """Note that a backward pass was aborted, whose end had been queued."""

    def on_end(self) -> None:
        """End the step at the end of a backward pass; calls `forget_end`."""

@type_check_only
class LocalReports(Protocol):
    """Receiver of reports about gradients that are in no step."""

    def report(self, leaves: Sequence[int]) -> object:
        """Report a backward pass that left gradients to these leaves, at its end. Return False if
        further passes are not to be reported."""

    def refuse_early_use(self, leaf: int) -> None:
        """Report a user's hook that has changed a parameter or cleared its gradient."""

# News of a `BackwardWatch`; they come in this order.
OUTPUT_REACHED: Final = 1
PASS_ABORTED: Final = 2

class BackwardWatch:
    """Observer of the backward passes through a module.

    Args:
        driver: receiver of events, held weakly.
        gate: switch for all backward passes.
        lock: the driver's `threading.RLock`.
        on_output: hook that is called where the driver has to decide whether a backward pass takes
            a step: the pass has explicit inputs, compiled autograd runs it, `takes_outputs` was
            given as False, `gate` is off, or another thread has the lock. Otherwise the pass takes
            one, without a call.
        reports: receiver of reports about gradients that are in no step.
    """

    def __init__(
        self,
        driver: PassHandler,
        gate: Gate,
        lock: RLock,
        on_output: Callable[..., None],
        reports: LocalReports,
    ) -> None: ...
    def begin_forward(self, keep: bool) -> None:
        """Note that a forward pass begins in this thread. Forget earlier ones, unless `keep`."""

    def expect_outputs(self, outputs: list[Tensor]) -> list[Tensor]:
        """Hook outputs of a forward pass. Return those outputs that are leaves. They are not
        hooked, because the caller has to remove their hooks."""

    def allow_outputs(self, outputs: list[Tensor]) -> list[Tensor]:
        """Hook outputs of a forward pass, and report no gradients of passes through them. Return
        those outputs that are leaves, as `expect_outputs`."""

    def reach_allowed_output(self, grad: Tensor) -> None:
        """Hook of such an output that is a leaf."""

    def reach_output(self, grad: Tensor) -> None:
        """Hook of an expected output that is a leaf."""

    def follow(self, awaits_gradients: bool, takes_outputs: bool) -> None:
        """Follow the driver's `Life`: call `on_first_grad` for gradients, and take outputs without
        the driver, or not."""

    def take_news(self) -> int:
        """Return what happened without the driver since the last call: a sum of news."""

    def report_local(self, on: bool) -> None:
        """Set `reports_local`."""

    @property
    def reports_local(self) -> bool:
        """True if gradients that are in no step are reported, unless the gate is off."""

    def note_output(self) -> None:
        """Note that the running backward pass has reached an output."""

    def queue_end(self) -> None:
        """Queue `on_end` at the end of the running graph task, unless one is queued already."""

    def forget_end(self) -> None:
        """Forget the queued end, which then does nothing."""

    @property
    def is_queued(self) -> bool:
        """True within a backward pass whose end was queued."""

    @property
    def reached_s(self) -> float:
        """Time at which the last pass reached an output, in seconds of `perf_counter`; infinity if
        it did not."""

def has_explicit_inputs() -> bool:
    """Return True if the running backward pass has explicit inputs (`autograd.grad`)."""

def is_compiled_backward() -> bool:
    """Return True within a backward pass that compiled autograd runs."""

# autograd/gradient_counter.cpp

def add_bounds(bound: float, amax: float) -> float:
    """Return a bound on the magnitude of a sum from bounds of its summands. Infinite only if one of
    them is, because an infinite bound stands for a gradient that is not finite."""

class BucketMembers:
    """Leaves of each bucket."""

    def __init__(self, leaves: Sequence[Sequence[int]]) -> None: ...

class BucketPacking:
    """Packing plan of a bucket: positions that are packed together, with their layout, and the
    position and layout of each leaf that is packed on arrival."""

    def __init__(
        self, together: Sequence[int], layout: Layout, early: Sequence[tuple[int, Layout]]
    ) -> None: ...

class EagerSlot:
    """Destination of a large leaf, whose gradient is packed on arrival, times `scale`, into the
    only slice of a layout. With `sums_squares`, squares are summed for `GradientCounter.pack`."""

    def __init__(
        self,
        leaf: int,
        buffer: Tensor,
        layout: Layout,
        scale: float,
        sums_squares: bool = False,
    ) -> None: ...

class BucketListener:
    """Receiver of buckets that have all gradients that they expect."""

class GradientCounter:
    """Leaves that announce their gradients."""

    @property
    def leaves(self) -> list[Tensor]: ...
    def arm(
        self,
        members: BucketMembers,
        expected: Sequence[int],
        eager: Sequence[EagerSlot],
        on_bucket: BucketListener | Callable[[int], None],
    ) -> None:
        """Start counting gradients. `on_bucket(b)` is called once bucket b has all it expects."""

    def disarm(self) -> None:
        """Stop counting and release the callback."""

    def note_home(self) -> None:
        """Make the current streams those of a step that begins later, within backward. No effect
        while a step runs."""

    def on_home_streams(self, body: Callable[[], object]) -> None:
        """Call `body` on the streams of the step, for which the current ones then wait."""

    def take(self, bucket: int, keep: bool) -> list[Tensor | None]:
        """Return a bucket's gradients. Gradients that arrive later count as late. With `keep`, the
        leaves continue to accumulate into them."""

    def take_one(self, leaf: int) -> Tensor | None:
        """Return one leaf's gradient."""

    def pack(
        self,
        bucket: int,
        buffer: Tensor,
        packing: BucketPacking,
        keep: bool,
        scale: float,
        squares: Tensor | None = None,
    ) -> float:
        """Take a bucket's gradients and pack those that are not packed yet, times `scale`, into the
        bucket's CPU memory. Return a bound on all magnitudes, as `pack_` does. `squares`, of a
        number for each leaf of the bucket, receives the sums of squares."""

    def used(self) -> list[bool]:
        """For each leaf, return True if a gradient arrived."""

    def all_used(self) -> bool:
        """Return True if a gradient arrived for every leaf."""

    def is_complete(self) -> bool:
        """Return True if a gradient arrived for every leaf, and none late."""

    def is_as_expected(self) -> bool:
        """Return True if each leaf received as many gradients as `arm` expected."""

    def late(self) -> list[bool]:
        """For each bucket, return True if a gradient arrived after `take`."""

    def counts(self) -> list[int]:
        """Return the number of gradients that arrived, by leaf."""

    def arrivals(self) -> list[int]:
        """Return the leaf of each gradient in order of arrival, repeats included."""

    def arrival_times(self) -> list[float]:
        """Return the arrival time of each gradient, in seconds of `time.perf_counter`."""

    def arrival_count(self) -> int:
        """Return the number of gradients that arrived."""

# step/collectives.cpp

class Collectives:
    """All-reduces that a step starts and waits for."""

    def takes(self, device: torch.device) -> bool:
        """Return True if tensors on a device can be reduced."""

class CollectivesInPython(Collectives):
    """Collectives of a transport, by its method `all_reduce`."""

    def __init__(self, all_reduce: Callable[..., Any]) -> None: ...

class CollectivesOfOne(Collectives):
    """Collectives of a group of one rank."""

    def __init__(self) -> None: ...

# step/device_collectives.cpp

class StreamBackend:
    """A backend of torch for one type of devices, whose works are ordered by streams."""

    def __init__(self, backend: Backend, device: torch.device) -> None: ...
    @property
    def issued(self) -> int:
        """Number of operations that the extension has started."""

    @property
    def in_flight(self) -> bool:
        """True if one of them that nobody has waited for has not finished."""

    def close(self) -> None:
        """Release the backend. From now on Python waits, and raises for what has not finished."""

class DeviceCollectives(Collectives):
    """Collectives of a `StreamBackend`."""

    def __init__(
        self,
        elsewhere: Collectives,
        in_python: Collectives,
        backend: StreamBackend,
        averages: bool,
        adopt: Callable[[dist.Work], Any],
        fail: Callable[[Tensor, bool, BaseException], None],
    ) -> None:
        """Create the collectives.

        Args:
            elsewhere: for tensors on other devices.
            in_python: for the first operation on a device, which connects it, for means that the
                backend can't take, and for a closed transport.
            backend: for all others.
            averages: True if the backend can divide a sum by the number of ranks.
            adopt: returns the `Work` of a work of the backend.
            fail: raises for a tensor, of which `average` says whether it was to be averaged, and
                the error of the backend.
        """

# autograd/leaves.cpp

class GraphView:
    """Result of walking the autograd graph behind a loss before backward."""

    @property
    def used(self) -> list[bool]:
        """For each leaf, True if the graph leads to it."""

    @property
    def foreign(self) -> list[Tensor]:
        """Leaves in the graph that do not belong to the set."""

    @property
    def opaque(self) -> bool:
        """True if a node is written in Python and may run nested backward passes."""

    @property
    def whole(self) -> bool:
        """True if backward must run through the whole graph, because such a node does not support a
        restricted set of inputs, or leads to none of the leaves of the set."""

class LeafTypes:
    """Shapes and dtypes of the leaves of a tree. A dtype is None if torch does not have it;
    `reduced` are the leaves with gradients."""

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype | None],
        reduced: Sequence[bool],
    ) -> None: ...
    def first_mismatch(self, leaves: list[Any], differentiable: bool) -> int:
        """Return the position of the first leaf that is not a tensor of its shape and dtype, or -1.

        None matches, unless `differentiable`: then reduced leaves must be present, and must not be
        inference tensors. A leaf that is not reduced mismatches only by another floating dtype.
        """

    def first_differentiated(self, leaves: list[Any], graphs: bool) -> int:
        """Return the position of the first leaf whose derivatives would be lost, or -1: one with a
        forward-mode tangent or, with `graphs`, with a graph behind it."""

class LeafSet(GradientCounter):
    """Fresh autograd leaves over the memory of parameters, none of which is None."""

    def __init__(self, params: list[Tensor]) -> None: ...
    def inspect(self, loss: Tensor) -> GraphView:
        """Walk the graph behind a loss."""

# autograd/params.cpp

def add_to_context(context: int, grads: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add parameters with their gradients to a context of distributed autograd."""

class ParamSet(GradientCounter):
    """Parameters that live across steps, with hooks that announce the first gradient of a step to
    `watch`; see [Note: parameter hooks]."""

    def __init__(self, params: Sequence[Tensor], watch: BackwardWatch) -> None: ...
    def count_undefined(self, on: bool) -> None:
        """Set whether an undefined gradient within a step stands for zeros. Otherwise it is
        ignored."""

    def intact(self, params: list[Tensor]) -> bool:
        """Return True if the hooks are still where gradients of `params`, which were given to the
        constructor, will arrive."""

    def weigh(self, weight: float, before_first: Callable[[], object] | None) -> None:
        """Multiply the gradients that arrive from now on by `weight`. 0 drops them, and counts them
        as used. `before_first` is called before the first of them is accumulated."""

    def hook_count(self) -> int:
        """Return the number of hooks where gradients arrive, those of other owners included."""

    def leave_out_hooks(self, on: bool) -> None:
        """Set whether users' hooks after accumulation are left out of backward passes that take no
        step; see [Note: hooks after accumulation] in csrc/autograd/accumulation_hooks.h."""

    def run_hooks(self) -> None:
        """Run the deferred hooks of parameters that `assign` has given a mean, after the step."""

    def begin(self, defer: bool) -> None:
        """Start a step, before its first gradient. It ends with `disarm`, with or without `arm`. If
        `defer`, users' hooks after accumulation run only when `run_hooks` is called."""

    def await_gradients(self, leaves: Sequence[bool]) -> None:
        """Let the first gradient of one of these leaves open a step, until one begins, although no
        output was reached. Empty: none."""

    def reset_used(self) -> None:
        """Reset `used` to False for all parameters."""

    def aliases_buffer(self, leaves: Sequence[int], buffer: Tensor, layout: Layout) -> bool:
        """Return True if the gradients of `leaves` are slices of `buffer`, as far as they exist,
        and nothing else refers to its memory."""

    def assign(self, results: list[Tensor | None], replace: bool) -> None:
        """Assign `results` as gradients: in place where a gradient existed before the step, unless
        `replace` is set. None keeps the previous gradient. New gradients have the strides that
        their parameters have now."""

    def restore(self) -> None:
        """Restore the gradients that existed before the step. No effect after `disarm`."""

    def forget(self) -> None:
        """Forget the gradients that existed before the step, which `restore` would restore."""

# step/flight_ring.cpp

class FlightEntry:
    """An operation in a ring. Once newer ones have replaced it, calls do nothing."""

    @property
    def launched_s(self) -> float:
        """Time of the launch, in seconds of `time.perf_counter`."""

    def note_wait(self) -> None:
        """Record that this rank waits for the operation from now on; a second call does nothing."""

    def note_done(self) -> None:
        """Record that the operation has finished."""

class FlightRing:
    """The newest `size` operations of a `GradSync` or communicator."""

    def __init__(self, size: int) -> None: ...
    def launch(self, source: int, step: int, position: int) -> FlightEntry:
        """Record an operation about to be started; arguments as in `FlightRecord`."""

    def entry(self, number: int) -> FlightEntry:
        """Return a recorded operation, without the time of its launch."""

    def fail(self) -> None:
        """Mark all operations in flight as failed."""

    def records(self) -> list[tuple[int, int, int, int, float, float, float]]:
        """Return the newest operations, with the fields of `FlightRecord`."""

# step/profile.cpp; see [Note: rows of collectives]

def is_profiled() -> bool:
    """Return True if scopes of `torch.profiler.record_function` are recorded. A scope costs
    microseconds even if nothing is recorded."""

class CollectiveRange:
    """Range of a collective in a profile."""

# step/executor.cpp; see [Note: one executor]

class StepBucket:
    """Constants of a bucket; see `fddp.runtime.program.BucketProgram`. With `keep`, the leaves
    continue to accumulate into the gradients that were packed."""

    def __init__(
        self,
        leaves: Sequence[int],
        layout: Layout,
        packing: BucketPacking,
        padded_numel: int,
        keep: bool,
        text: str,
    ) -> None: ...

class Instr:
    """An operation of a schedule. It works on elements `start` to `stop` of a bucket (-1 for a
    control word that travels by itself), and waits for the collectives at the positions `waits`.
    Its guard decides whether it runs: idle buckets are left out because no rank used them in the
    step before, and a gradient that comes for one all the same is late. The title is its name in a
    profile."""

    def __init__(
        self,
        kind: Literal["pack", "collect", "word", "unpack", "await", "call"],
        guard: Literal["always", "unless idle", "if used", "late"],
        is_native: bool,
        needs_report: bool,
        bucket: int,
        start: int,
        stop: int,
        waits: Sequence[int],
        title: str,
    ) -> None: ...

class StepProgram:
    """The list of instructions of a program on one rank, with its constants."""

    def __init__(
        self,
        instrs: list[Instr],
        buckets: Sequence[StepBucket],
        leaves: int,
        last_bucket: int,
        summed_word: int,
        world_size: int,
        average: bool,
        has_views: bool,
        limb_bits: int,
        limbs: int,
        defers_report: bool,
        compared: int,
        word_title: str,
    ) -> None: ...

class StepCalls:
    """Functions of Python that run what is not native; each receives the step.

    Args:
        run: runs the operation at a position. It returns the work of a collective, and receives
            True if the caller waits for it next.
        fail_pack: packs zeros at a position, whose bucket could not be packed natively.
        write_word: returns the control word of this rank, in the memory that is reduced; None for a
            regular one.
        read_report: acts on the sum of the control words, and receives True if it is that of
            regular ones. Returns the late buckets, and True if nothing is repaired and results need
            no factor.
    """

    def __init__(
        self,
        run: Callable[[Any, int, bool], Any],
        fail_pack: Callable[[Any, int, Exception], None],
        write_word: Callable[[Any], Tensor | None],
        read_report: Callable[[Any, bool], tuple[Sequence[int], bool]],
    ) -> None: ...

class Executor(BucketListener):
    """Runs the list of one step.

    Args:
        program, calls, collectives: of the step.
        ring: ring of the flight recorder.
        source: number of the schedule in the ring.
        number: number of the step.
        step: weak reference to the step, which the functions of Python receive.
        idle: buckets that are left out.
        records_times: True if Python starts collectives, to record their times.
        measures: True if Python makes the results, and measures them.
    """

    def __init__(
        self,
        program: StepProgram,
        calls: StepCalls,
        collectives: Collectives,
        ring: FlightRing,
        source: int,
        number: int,
        step: ReferenceType[Any],
        idle: Sequence[int],
        records_times: bool,
        measures: bool,
    ) -> None: ...

    # As in a control word, from packing.
    @property
    def is_finite(self) -> bool: ...
    @property
    def may_overflow(self) -> bool: ...
    @property
    def is_regular(self) -> bool:
        """True if the report is that of regular words: nothing is repaired, and results need no
        factor. Of a deferred report that is assumed, until it has been read."""

    @property
    def has_report(self) -> bool:
        """True if the report has been read."""

    @property
    def gives_views(self) -> bool:
        """True if results are slices of the buffers."""

    @property
    def position(self) -> int:
        """Position in the schedule of the operation under way, or -1."""

    def __call__(self, bucket: int) -> None:
        """Note that all expected gradients of a bucket have arrived, and run the list as far as the
        launch rule allows during backward. Never raises."""

    def pack_leaves(self, leaves: list[Tensor | None], factor: float) -> None:
        """Pack gradients by leaf of the plan, times a factor."""

    def pack_counted(self, counter: GradientCounter, factor: float) -> None:
        """Pack the gradients that a counter collects, times a factor."""

    def set_regular_word(self, values: Tensor, fingerprint: int) -> None:
        """Send `values` with a fingerprint as the control word, if all gradients have arrived by
        then."""

    def leave_to_python(self) -> None:
        """Pack by functions of Python from now on, and send no regular word."""

    def release(self) -> None:
        """Release gradients and buffers. Only the control word is kept, for `settle`."""

    def set_buffer(self, bucket: int, buffer: Tensor) -> None:
        """Set the memory of a bucket."""

    def buffer(self, bucket: int) -> Tensor | None:
        """Return the memory of a bucket; None if it has none yet."""

    def run(self, phase: int) -> None:
        """Run the list as far as the launch rule allows; with `Phase.FREE`, to its end.

        Raises:
            BaseException: the error of an instruction, now or during backward; with `FREE` only.
        """

    def settle(self) -> None:
        """Read a deferred report, unless that has happened. Raises what comes of it."""

    def drain(self) -> None:
        """Wait for all collectives in flight."""

    def word(self) -> Tensor | None:
        """Return the control word, or its sum once the report was read; None if none was
        written."""

    def buffers(self) -> list[Tensor | None]:
        """Return the memory of all buckets."""

    def results(self) -> list[Tensor | None]:
        """Return by leaf the slices of the buffers."""

    def note_magnitude(self, is_finite: bool) -> None:
        """Note a packed bucket with large or unknown numbers."""

    def ready_s(self) -> list[float]:
        """Return the time at which each bucket was ready; infinite before."""

    def launch_s(self) -> list[float]:
        """Return the time at which each bucket was first sent; NaN before."""

# c10d/backend_release.cpp; see [Note: freeing waits]

class BackendRelease:
    """Reference to a torch.distributed backend, released on a thread without Python state."""

    def __init__(self, backend: Backend) -> None: ...
    def start(self) -> None:
        """Release the backend, whose destructor may wait."""

    def leak(self) -> None:
        """Never release the backend. Used in forked processes, which lack the threads that the
        destructor waits for."""

    @property
    def done(self) -> bool:
        """True if the destructor has returned, or never runs."""

# shm_arena_binding.cpp

def shm_available_bytes(root: str = "") -> int:
    """Return the number of bytes that can be allocated without swapping. `root` is prefixed to the
    paths of system files."""

class ShmArena:
    """Anonymous memory of a process that other processes map. Freed with its last mapping.

    Addresses are reserved; pages on demand. A `span_bytes` of 0 is the size of physical memory.

    Raises:
        OSError: the memory cannot be reserved.
    """

    def __init__(self, span_bytes: int = 0) -> None: ...
    @property
    def fd(self) -> int: ...
    @property
    def span(self) -> int:
        """Size, in bytes."""

    @property
    def reserved(self) -> int:
        """Bytes of the pages that are reserved."""

    @property
    def used(self) -> int:
        """Bytes of the blocks in use."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Allocate a tensor; None if no pages can be reserved."""

    def holds(self, tensor: Tensor) -> bool: ...
    def allocate_zeroed(self, n_bytes: int) -> int | None:
        """Return the offset of a new block, which is never freed; None if no pages can be
        reserved."""

    def make_control_block(self, members: int) -> int | None:
        """Return the offset of a new control block; None if no pages can be reserved."""

    def trim(self) -> int:
        """Return unused pages to the system, and their number of bytes to the caller."""

    def close_fd(self) -> None:
        """Close this process's descriptor. Descriptors that others have stay open."""

    def read(self, offset: int, n_bytes: int) -> bytes: ...
    def write(self, offset: int, data: bytes) -> None: ...

class ShmView:
    """Mapping of another process's arena. The descriptor may be closed afterwards.

    Raises:
        ValueError: `fd` is not a sealed anonymous file of this size and user.
        OSError: the mapping failed.
    """

    def __init__(self, fd: int, span: int) -> None: ...
    @property
    def span(self) -> int: ...
    def read(self, offset: int, n_bytes: int) -> bytes: ...
    def write(self, offset: int, data: bytes) -> None: ...

# c10d/shm_backend_binding.cpp

class ShmOperation:
    """An operation of `ShmBackend.start`."""

    def status_within(self, seconds: float) -> int:
        """Return the status (`SHM_OK`, ...), waiting for at most some seconds."""

    @property
    def done(self) -> bool: ...
    @property
    def done_s(self) -> float | None:
        """Time of the end, in seconds of `time.perf_counter`; None before."""

    def end_range(self, range: CollectiveRange) -> None:
        """End a range of a profile at the completion of the operation."""

    def descriptors(self) -> list[dict[str, Any]]:
        """After `SHM_MISMATCH`, return the operation of each member; nothing otherwise."""

class ShmBackend(Backend):
    """Ranks that have mapped each other's arenas, a backend of torch. Members are numbered by their
    place. The group's control block lies in its first member's arena.

    Args:
        views: arenas of the members, None at this member's `index`.
        waiters_on_host: number of processes of this host that may wait at the same time.

    Raises:
        OSError, RuntimeError: pages cannot be reserved.
    """

    def __init__(
        self,
        arena: ShmArena,
        views: Sequence[ShmView | None],
        index: int,
        control_block_offset: int,
        timeout_s: float,
        waiters_on_host: int = 0,
    ) -> None: ...
    @staticmethod
    def alone(timeout_s: float) -> ShmBackend:
        """Create the backend of a group of one rank."""

    def split(self, store: dist.Store, ranks: Sequence[int], timeout_s: float) -> ShmBackend:
        """Create a backend of some ranks of this one, which meet in a new part of the store."""

    def start(
        self,
        kind: str,
        tensor: Tensor,
        src: int = 0,
        average: bool = False,
        wait_soon: bool = False,
        prompt: bool = False,
        tree: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> ShmOperation:
        """Start an operation on a whole tensor, in place. Never blocks.

        Raises:
            TypeError, ValueError: the tensor is unsuitable, which does not affect the other
            members.
        """

    def collectives_of_steps(self, adopt: Callable[[ShmOperation], Any]) -> Collectives:
        """Return all-reduces for steps. `adopt` returns the `Work` of an operation."""

    @property
    def options(self) -> Backend.Options:
        """Options with the timeout of the group, as of torch's backends."""

    @property
    def failure(self) -> tuple[int, tuple[int, ...], int]:
        """Status that ended the group, the members to blame, and the member that reported it;
        `SHM_OK` and -1 before."""

    @property
    def states(self) -> list[str]:
        """For each member, "active", "left", "failed" or, if its process has, "ended"."""

    def fail(self, status: int, members: Sequence[int]) -> None:
        """End the group with a status, for which some members are to blame."""

    @property
    def staged_operations(self) -> int:
        """Number of operations whose data has passed through this rank's staging buffer."""

class ReconfigurableBackend(Backend):
    """The backend opened last for a group whose ranks may change.

    Args:
        open: called with a uuid, the handles of all ranks, and the time limits in seconds of the
            call and of later operations; returns a backend of these ranks.
        handle: of this rank, which begins with "fddp:".
        rank, size: until the first one is opened.
        timeout_s: time limit of operations, in seconds.
    """

    def __init__(
        self,
        open: Callable[[int, list[str], float, float], Backend],
        handle: str,
        rank: int,
        size: int,
        timeout_s: float,
    ) -> None: ...
    def reopen(self, uuid: int, handles: Sequence[str], timeout_s: float) -> None:
        """Open a backend for the ranks with these handles, in place of the one opened before, whose
        pending operations end; blocks.

        Raises:
            RuntimeError: the handles are malformed, or this rank's is not among them. The backend
            opened before remains.
        """

    @property
    def handle(self) -> str: ...
    @property
    def opened(self) -> Backend | None:
        """Backend opened last; None before, after an error and after `abort`."""

    @property
    def options(self) -> Backend.Options:
        """Options with the timeout of the group, as of torch's backends."""

def leave_open_groups() -> None:
    """Leave all groups of backends, as `shutdown` does."""

# Status of an operation; all but the first are final.
SHM_PENDING: Final = 0
SHM_OK: Final = 1
SHM_LOST: Final = 2  # members died, or left while they were needed
SHM_TIMEOUT: Final = 3  # members did not come in time
SHM_MISMATCH: Final = 4  # members met in different operations; the group stays usable
SHM_CLOSED: Final = 5  # this rank left the group
SHM_CORRUPT: Final = 6  # the control block contains invalid data
SHM_PEER_FAILED: Final = 7  # a member reported a failure outside of the group

# c10d/completion_timestamp.cpp

class CompletionTimestamp:
    """Completion time of a torch.distributed Work, recorded without Python."""

    def __init__(self, work: dist.Work) -> None: ...
    @property
    def completed_s(self) -> float | None:
        """Seconds of `time.perf_counter`; None while the Work is pending."""

def end_range_after(works: Sequence[dist.Work], range: CollectiveRange) -> None:
    """End a range of a profile at the completion of the last of some Works."""

# c10d/work_spin.cpp

class WorkSpin:
    """Polls Works of torch.distributed for a short time."""

    def __init__(self) -> None: ...
    def poll(self, work: dist.Work) -> None:
        """Return once the work is completed, or a short time has passed."""
