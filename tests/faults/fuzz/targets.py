"""One call of the extension for each input: only documented errors may come of it.

`one_input` is what fuzzers call. What it must not do is end the process, hang, or raise anything
but the errors by which the extension refuses arguments.
"""

from __future__ import annotations

import threading
import warnings
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from fddp.native import extension
from tests.faults.fuzz.drawing import DTYPES, Draw

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REFUSALS = (TypeError, ValueError, IndexError, RuntimeError, OverflowError, OSError)
_MOST_CALLS = 12
_OPEN = SimpleNamespace(is_on=True)
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def one_input(data: bytes) -> str:
    """Tries an input; the name of what it called."""
    draw = Draw(data)
    name = draw.one_of(tuple(TARGETS))
    # torch's own text of a tensor reads its memory, which may be gone.
    with warnings.catch_warnings(), mock.patch.object(torch.Tensor, "__repr__", object.__repr__):
        warnings.simplefilter("ignore")
        try:
            TARGETS[name](draw)
        except REFUSALS:
            pass
        except MemoryError:
            # Sizes are checked before anything is allocated.
            pass
    return name


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _layout(draw: Draw) -> tuple[Any, list[tuple[int, ...]], int]:
    """A layout, its shapes and its elements: right ones as a rule."""
    shapes = [draw.shape() for _ in range(draw.below(5))]
    offsets, end = [], 0
    for shape in shapes:
        gap = 0 if draw.likely() else draw.below(4)
        offsets.append(end + gap)
        end += gap + int(torch.Size(shape).numel())
    arguments: list[Any] = [offsets, shapes, [_contiguous(shape) for shape in shapes], end]
    if not draw.likely():
        arguments[draw.below(4)] = draw.anything()
    if not draw.likely() and offsets:
        offsets[draw.below(len(offsets))] = draw.one_of((-1, 2**62, 2**63 - 1, end + 1))
    if not draw.likely() and shapes:
        shapes[draw.below(len(shapes))] = (draw.number(), draw.number())
    return extension.load().Layout(*arguments), shapes, end


def _copying(draw: Draw) -> None:
    layout, shapes, numel = _layout(draw)
    dtype = draw.one_of(DTYPES[:6])
    buffer: Any = torch.ones(numel if draw.likely() else draw.below(40), dtype=dtype)
    if not draw.likely():
        buffer = draw.anything()
    leaves: Any = [None if draw.below(6) == 0 else draw.leaf(shape, dtype) for shape in shapes]
    if not draw.likely():
        leaves = draw.anything()
    if not draw.likely() and isinstance(leaves, list) and isinstance(buffer, torch.Tensor):
        leaves = [buffer.view(-1)[:1].expand(2), *leaves][: len(leaves)]
    module = extension.load()
    match draw.below(5):
        case 0:
            module.pack_(buffer, layout, leaves, draw.real())
        case 1:
            module.pack_add_(buffer, layout, leaves, draw.real())
        case 2:
            module.unpack_(leaves, layout, buffer, draw.real())
        case 3:
            module.scale_(buffer, draw.real())
        case _:
            results = module.slices(buffer, layout)
            live = module.LiveViews()
            live.add(buffer)
            for result in results:
                result.add_(1)
                live.contains(result)
            live.held_bytes([buffer])
            module.storage_use_count(buffer if draw.likely() else draw.anything())
            if results and draw.likely():
                module.invalidate(results, "gone")
                results[0].sum()


def _loose(draw: Draw) -> None:
    module = extension.load()
    match draw.below(6):
        case 0:
            module.storage_use_count(draw.anything())
        case 1:
            released = module.ReleasedBuffers()
            released.add(draw.anything())
            released.take(*(draw.anything() for _ in range(3)))
        case 2:
            module.invalidate(draw.anything(), draw.anything())
        case 3:
            module.LiveViews().add(draw.anything())
        case 4:
            module.LiveViews().held_bytes(draw.anything())
        case _:
            module.LiveViews().contains(draw.anything())


def _anywhere(draw: Draw) -> None:
    """Functions that take anything."""
    module = extension.load()
    match draw.below(3):
        case 0:
            module.shm_available_bytes(draw.anything())
        case 1:
            types = (module.BackendRelease, module.GraphView)
            draw.one_of(types)(draw.anything())
        case _:
            module.has_explicit_inputs(), module.is_compiled_backward()


def _operands(draw: Draw) -> None:
    module = extension.load()
    tensors = [draw.tensor() for _ in range(draw.below(4))]
    leaves: Any = [t if draw.likely() else draw.anything() for t in tensors]
    if not draw.likely():
        leaves = draw.anything()
    match draw.below(4):
        case 0:
            module.first_without_memory(leaves)
        case 1:
            module.have_derivatives(leaves, bool(draw.below(2)))
        case 2:
            arguments = [
                [t.shape if not t.is_nested else (1,) for t in tensors],
                [t.dtype for t in tensors],
                [t.device for t in tensors],
            ]
            if not draw.likely():
                arguments[draw.below(3)] = draw.anything()
            module.Operands(*arguments).matches(leaves)
        case _:
            types = module.LeafTypes(
                [draw.shape() for _ in tensors],
                [t.dtype for t in tensors][: None if draw.likely() else 1],
                [bool(draw.below(2)) for _ in tensors],
            )
            types.first_mismatch(leaves, bool(draw.below(2)))
            types.first_differentiated(leaves, bool(draw.below(2)))


class _Handler:
    """Receiver of the events of backward passes, which ends none of them."""

    def on_first_grad(self, context: int | None) -> None: ...
    def on_abort(self) -> None: ...
    def on_end(self) -> None: ...


class _Reports:
    """Receiver of reports about gradients that are in no step."""

    def report(self, leaves: list[int]) -> bool:
        return bool(leaves)

    def refuse_early_use(self, leaf: int) -> None: ...


def _watches(draw: Draw) -> None:
    """Observers of backward passes, with outputs of any kind, and a handler that may be gone."""
    handler = _Handler()
    lock = threading.RLock()
    watch = extension.load().BackwardWatch(handler, _OPEN, lock, lambda *_: None, _Reports())
    if not draw.likely():
        del handler
    for _ in range(draw.below(_MOST_CALLS)):
        try:
            match draw.below(7):
                case 0:
                    watch.queue_end()
                case 1:
                    watch.forget_end()
                case 2:
                    watch.follow(draw.anything(), bool(draw.below(2)))
                case 3:
                    watch.note_output(), watch.take_news(), watch.reach_output(draw.anything())
                case 4:
                    watch.expect_outputs(draw.anything())
                case 5:
                    watch.report_local(bool(draw.below(2)))
                    watch.allow_outputs(draw.anything()), watch.reach_allowed_output(None)
                case _:
                    param = torch.ones(2, requires_grad=True)
                    outputs = [param * 2, param, torch.ones(1)]
                    watch.expect_outputs(outputs[draw.below(3) :])
                    watch.follow(bool(draw.below(2)), bool(draw.below(2)))
                    watched = extension.load().ParamSet([param], watch)
                    outputs[0].sum().backward()
                    del watched
        except REFUSALS:
            continue


def _arrivals(draw: Draw) -> None:
    """Sets of leaves, armed with any buckets and asked for any number."""
    module = extension.load()
    params: Any = [torch.ones(3, requires_grad=True) for _ in range(draw.below(4))]
    if not draw.likely():
        params = [draw.tensor(sound=True) for _ in params]
    is_leaves = draw.below(2) == 0
    handler = _Handler()
    watch = module.BackwardWatch(handler, _OPEN, threading.RLock(), lambda *_: None, _Reports())
    watch.follow(True, True)
    found = module.LeafSet(params) if is_leaves else module.ParamSet(params, watch)
    for _ in range(draw.below(_MOST_CALLS)):
        try:
            _ask(draw, module, found, params, is_leaves)
        except REFUSALS:
            continue


def _ask(draw: Draw, module: Any, found: Any, params: list[Any], is_leaves: bool) -> None:
    match draw.below(10):
        case 0:
            count = len(params)
            members = [[draw.below(count or 1) for _ in range(draw.below(3))] for _ in range(2)]
            if not draw.likely():
                members = [[draw.number()]]
            expected = [1] * (count if draw.likely() else draw.below(6))
            layout = module.Layout([0], [(3,)], [(1,)], 3)
            eager = []
            if not draw.likely():
                buffer = torch.ones(draw.below(6))
                eager = [module.EagerSlot(draw.number(), buffer, layout, draw.real())]
            found.arm(module.BucketMembers(members), expected, eager, lambda *_: None)
        case 1:
            found.take(draw.number(), bool(draw.below(2)))
        case 2:
            layout = module.Layout([0], [(3,)], [(1,)], 3)
            together = [draw.number() for _ in range(draw.below(3))]
            early = [(draw.number(), layout) for _ in range(draw.below(2))]
            packing = module.BucketPacking(together, layout, early)
            found.pack(draw.number(), torch.ones(draw.below(5)), packing, True, 1.0)
        case 3:
            found.arrival_count()
        case 4:
            found.take_one(draw.number())
        case 5:
            torch.autograd.backward(sum((leaf.sum() for leaf in found.leaves), torch.zeros(())))
        case 6:
            found.counts(), found.arrivals(), found.arrival_times(), found.late(), found.used()
        case 7:
            found.disarm()
        case 8 if is_leaves:
            found.inspect(draw.tensor() if draw.below(2) else sum(p.sum() for p in found.leaves))
        case 8:
            layout = module.Layout([0], [(3,)], [(1,)], 3)
            found.aliases_buffer([draw.number()], torch.ones(draw.below(5)), layout)
        case _ if not is_leaves:
            found.intact([draw.tensor() for _ in range(draw.below(4))])
            found.assign([draw.anything() for _ in range(draw.below(4))], bool(draw.below(2)))
            found.restore()
            found.leave_out_hooks(bool(draw.below(2))), found.begin(bool(draw.below(2)))
            found.run_hooks()


def _memory(draw: Draw) -> None:
    """Arenas, views and groups, without peers."""
    module = extension.load()
    # Not larger: blocks of any size may be asked for, and pages would be there.
    arena = module.ShmArena(4 << 20 if draw.likely() else draw.one_of((1, -1, 2**62, 2**64)))
    control_block = arena.make_control_block(2 if draw.likely() else draw.number())
    for _ in range(draw.below(_MOST_CALLS)):
        try:
            match draw.below(7):
                case 0:
                    tensor = arena.empty(draw.number(), draw.one_of(DTYPES))
                    arena.holds(tensor if draw.likely() else draw.anything())
                case 1:
                    arena.read(draw.number(), min(draw.number(), 2**63))
                case 2:
                    arena.write(draw.number(), b"1234")
                case 3:
                    arena.allocate_zeroed(draw.number())
                case 4:
                    arena.trim()
                case 5:
                    module.ShmView(draw.one_of((-1, 0, arena.fd, 9999)), draw.number())
                case _:
                    _group(draw, module, arena, control_block)
        except REFUSALS:
            continue


def _group(draw: Draw, module: Any, arena: Any, control_block: Any) -> None:
    view = module.ShmView(arena.fd, arena.span)
    arguments: list[Any] = [arena, [None, view], 0, control_block, 0.01, 2]
    if not draw.likely():
        arguments[draw.below(len(arguments))] = draw.anything() if draw.below(2) else draw.number()
    group = module.ShmBackend(*arguments)
    try:
        kind = draw.one_of((*_KINDS, "what"))
        work = group.start(
            kind,
            draw.tensor() if draw.likely() else draw.anything(),
            draw.number(),
            bool(draw.below(2)),
            [draw.number() for _ in range(draw.below(8))],
        )
        work.status_within(0.02), work.done, work.done_s, work.descriptors()
        group.fail(draw.number(), [draw.number()])
    finally:
        group.shutdown()


TARGETS: Mapping[str, Callable[[Draw], None]] = MappingProxyType(
    {
        "copying": _copying,
        "copying again": _copying,
        "loose tensors": _loose,
        "anywhere": _anywhere,
        "operands": _operands,
        "arrivals": _arrivals,
        "memory": _memory,
        "backward passes": _watches,
    }
)
"""What an input may lead to."""
