"""Divergence check of replicas by digests of their trees.

Ranks compare one number for the whole tree. Only if it differs they search for the leaf, and in it
for the element.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fddp.collectives import handshake
from fddp.collectives.communicator import Communicator, communicator_of
from fddp.collectives.replicas.digest import bytes_of, digest_of, element_at
from fddp.collectives.replicas.snapshot import check_dense
from fddp.core.entrance import entrance
from fddp.core.plan.leaf import LeafSpec
from fddp.core.protocol.differences import (
    format_digests,
    format_ranks,
    format_values,
    minority_ranks,
    ranks_by_value,
)
from fddp.core.protocol.messages import decode_all
from fddp.core.text import counted, leaf_text
from fddp.errors import DesyncError
from fddp.native.untraced import untraced
from fddp.runtime.inputs import check_no_transform, outside_tracing
from fddp.telemetry.call_site import call_chain
from fddp.transport import Group
from fddp.tree.describe import leaf_specs
from fddp.tree.foreign import adapted
from fddp.tree.modules import named_params
from fddp.tree.pytree import flatten

_PIECES = 512  # pieces whose digests are compared in each round of the search for an element
_SMALL_BYTES = 4096  # size of a piece that is exchanged in full
_WAY_OUT = (
    "copy one rank's values to all ranks with fddp.broadcast or fddp.reconcile, or restart from a "
    "checkpoint; replicas diverge if some ranks skip steps, if random numbers differ, or if "
    "parameters are updated from values that are not synchronised"
)

_OUTSIDE = (
    "call check_replicas outside of the compiled function: it compares values, and a graph has none"
)


@entrance
@untraced(_OUTSIDE)
def check_replicas(
    tree: Any, group: Group | Communicator | None = None, *, every: int = 1, step: int = 0
) -> None:
    """Raise on every rank if ranks hold different trees. A collective call.

    Bits are compared: -0.0 differs from 0.0, and NaN equals a NaN of the same bits. The tree is
    read once, and ranks exchange 32 bytes each. The first call on a group opens a communicator,
    which operators on that group also use.

    Args:
        tree: tensors of any dtype, device and strides, JAX arrays and Python numbers; None is
            ignored. For example buffers or optimizer state. Not written. Of an `nn.Module`, all
            parameters are compared; pass its `state_dict()` to include buffers.
        group: ranks to compare, as in `fddp.pmean`; None for the default group.
        every: number of steps between two checks.
        step: number of this step, the same on all ranks. If `step % every` is not 0, this returns
            at once, without communication.

    Raises:
        DesyncError: ranks differ. The text has the first differing leaf in canonical order, the
            ranks of each digest, and the first differing element with both values. `path` and
            `ranks` are attributes. Also raised if ranks have trees of different structure, passed
            different `step` or `every`, or are in different calls. The group remains usable.
        PeerError: another rank's tree can't be read, or its `step` or `every` is invalid.
        TypeError, ValueError: this rank's tree can't be read, or `step` or `every` is invalid.
        TransformError: within a `torch.func` transform, or under a tracer. `torch.compile` breaks
            its graph at the call.
        RankLostError, SyncTimeoutError: a rank did not arrive.

    Example:
        >>> import fddp, torch
        >>> def compare(group):
        ...     params = {"w": torch.arange(4.0), "b": torch.zeros(2)}
        ...     fddp.check_replicas(params, group)
        ...     params["w"][2] += group.rank
        ...     try:
        ...         fddp.check_replicas(params, group, every=10, step=20)
        ...     except fddp.DesyncError as error:
        ...         return error.path, error.ranks
        >>> fddp.loopback(2, compare)
        [('w', (0, 1)), ('w', (0, 1))]
    """
    problem = _validate_period(every, step)
    if problem is None and step % every:
        return
    communicator = communicator_of(group, None)
    what = "check_replicas"
    try:
        check_no_transform(what, "call it outside of the transform")
    except Exception as error:
        problem = problem or error
    # A problem is reported to other ranks below, where no transform is active.
    with communicator.lock, outside_tracing(), torch.inference_mode(False):
        try:
            if problem is not None:
                raise problem
            own = _own(tree, _when(every, step))
            what = own.text
        except Exception as error:
            handshake.abort_handshake(communicator, communicator.place(()), what, error)
        received = handshake.compare(communicator, what, own.fingerprint, own.value, own.report())
        if received is not None:
            _check_when([received[rank]["when"] for rank in sorted(received)], own.text)
            raise _error(communicator, own, {rank: t["digests"] for rank, t in received.items()})


class _LocalDigest(NamedTuple):
    """Digests of this rank's tree. The lists have one entry for each leaf that is not None."""

    text: str  # the call
    when: str  # step and period; empty for the defaults
    leaves: list[Tensor]
    numbers: list[Any]  # the leaf, if it is a Python number, else None
    specs: list[LeafSpec]  # without strides; the dtype of a Python number is its type
    digests: list[int]

    @property
    def fingerprint(self) -> int:
        """Signed 64-bit hash, equal on ranks that compare trees of one structure at one step."""
        return _signed(hashlib.sha256(json.dumps([self.specs, self.when]).encode()).digest())

    @property
    def value(self) -> int:
        """Signed 64-bit hash, equal on ranks whose trees are equal."""
        return _signed(hashlib.sha256(np.array(self.digests, np.uint64).tobytes()).digest())

    def report(self) -> dict[str, Any]:
        """The report that ranks exchange if they differ."""
        details = ["check_replicas", [], -1, False, self.specs, []]
        report = {"text": self.text, "details": details}
        return {**report, "digests": self.digests, "when": self.when}


def _validate_period(every: Any, step: Any) -> Exception | None:
    for name, value in (("every", every), ("step", step)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            return TypeError(f"check_replicas: {name}={value!r} must be an int, a number of steps")
    if index(every) < 1:
        return ValueError(f"check_replicas: every={every!r} must be a number of steps above 0")
    return None


def _when(every: int, step: int) -> str:
    """Step and period for errors; empty for the defaults.

    >>> _when(1, 0), _when(10, 20)
    ('', ' at step 20, every=10')
    """
    return "" if (every, step) == (1, 0) else f" at step {index(step)}, every={index(every)}"


def _check_when(whens: list[str], text: str) -> None:
    """Raise if ranks are at different steps, where their replicas may differ."""
    if len(set(whens)) == 1:
        return
    groups = ranks_by_value([whens.index(when) for when in whens])
    received = "; ".join(
        f"{format_ranks(group)}{whens[group[0]] or ' without a step'}" for group in groups
    )
    raise DesyncError(
        f"{text}: ranks check at different steps, or not equally often: {received}; pass the same "
        f"step and the same every on all ranks; replicas were not compared",
        ranks=minority_ranks(groups),
    )


def _own(tree: Any, when: str) -> _LocalDigest:
    found, treedef = adapted(*flatten(named_params(tree, frozen=True)), "tree")
    paths, leaves, numbers = [], [], []
    for path, leaf in zip(treedef.paths, found, strict=True):
        if leaf is not None:
            paths.append(path)
            leaves.append(_tensor(path, leaf))
            numbers.append(None if isinstance(leaf, Tensor) else leaf)
    specs = [
        spec._replace(strides=None)
        if number is None
        else LeafSpec(spec.path, (), type(number).__name__)
        for spec, number in zip(leaf_specs(paths, leaves), numbers, strict=True)
    ]
    count = counted(len(leaves), "leaf")
    text = f"check_replicas of {count}{when}, called at {call_chain()}"
    return _LocalDigest(text, when, leaves, numbers, specs, [_digest(leaf) for leaf in leaves])


def _tensor(path: str, leaf: Any) -> Tensor:
    """A leaf as a tensor. A Python number becomes the bytes of its text."""
    if isinstance(leaf, bool | int | float | complex | str):
        text = leaf.hex() if isinstance(leaf, float) else repr(leaf)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)
    check_dense(f"check_replicas: {leaf_text(path)}", leaf)
    return leaf  # type: ignore[no-any-return]


def _error(
    communicator: Communicator, own: _LocalDigest, digests: dict[int, list[int]]
) -> DesyncError:
    """The error of trees that differ, the same on every rank. Collective: searches the element."""
    columns = zip(*(digests[rank] for rank in sorted(digests)), strict=True)
    differing = {leaf: column for leaf, column in enumerate(columns) if len(set(column)) > 1}
    leaf, column = next(iter(differing.items()))
    spec = own.specs[leaf]
    groups = ranks_by_value(column)
    tensor, number = own.leaves[leaf], own.numbers[leaf]
    if number is None:
        position, values = _first_difference(communicator, tensor, own.text)
    else:
        position, values = 0, _values(communicator, own.text, repr(number))
    others = len(differing) - 1
    more = f"; {others} more leaves differ" if others > 1 else "; one more leaf differs" * others
    return DesyncError(
        f"{own.text}: replicas differ, first in {leaf_text(spec.path)} of shape {spec.shape}, "
        f"{spec.dtype}: {format_digests(groups, column)}; {_index(position, spec.shape)}: "
        f"{format_values(groups, values)}{more}; {_WAY_OUT}",
        path=spec.path,
        ranks=minority_ranks(groups),
    )


def _values(communicator: Communicator, what: str, own: str) -> list[str]:
    place = communicator.place(())
    texts = handshake.gather_texts(communicator, place, what, own.encode())
    return decode_all(texts, bytes.decode, "check_replicas")


def _first_difference(communicator: Communicator, leaf: Tensor, what: str) -> tuple[int, list[str]]:
    """Flat index of a leaf's first element that differs, and each rank's value. A collective
    call."""
    place, flat, itemsize = communicator.place(()), bytes_of(leaf), leaf.element_size()
    start, stop = 0, flat.numel() // itemsize
    while (stop - start) * itemsize > _SMALL_BYTES:
        size = -(-(stop - start) // _PIECES)
        cuts = range(start, stop, size)
        digests = [_digest(flat[cut * itemsize : min(cut + size, stop) * itemsize]) for cut in cuts]
        payload = np.array(digests, np.uint64).tobytes()
        received = handshake.gather(communicator, place, what, payload)
        piece = _first_apart([np.frombuffer(text, np.uint64) for text in received])
        start, stop = cuts[piece], min(cuts[piece] + size, stop)
    own = flat[start * itemsize : stop * itemsize].cpu().numpy().tobytes()
    received = handshake.gather(communicator, place, what, own)
    rows = [np.frombuffer(text, np.uint8).reshape(-1, itemsize) for text in received]
    element = _first_apart(rows)
    values = _values(communicator, what, repr(element_at(leaf, start + element)))
    bits = [row[element].tobytes()[::-1].hex() for row in rows]  # memory is little-endian
    if len(set(values)) < len(set(bits)):
        values = [f"{text} (0x{bit})" for text, bit in zip(values, bits, strict=True)]
    return start + element, values


def _first_apart(rows: Sequence[np.ndarray[Any, Any]]) -> int:
    stack = np.stack(rows)
    apart = (stack != stack[0]).reshape(len(rows), len(stack[0]), -1).any(axis=(0, 2))
    return int(apart.argmax())


def _index(position: int, shape: tuple[int, ...]) -> str:
    if not shape:
        return "its value"
    spot = tuple(int(i) for i in np.unravel_index(position, shape))
    return f"at index {spot if len(spot) != 1 else spot[0]}"


def _digest(tensor: Tensor) -> int:
    """First 64 bits of a tensor's digest."""
    return int.from_bytes(digest_of(tensor)[:8], "big")


def _signed(word: bytes) -> int:
    return int.from_bytes(word[:8], "big", signed=True)
