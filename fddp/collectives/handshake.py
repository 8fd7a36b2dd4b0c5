"""Handshake of ranks: check that all ranks call the same operator before data moves.

[Note: who meets whom]
Backends react to mismatched sizes by hanging or by returning wrong numbers. So each operator starts
with one small all-gather of four integers, of the same size for every operator: a fingerprint of
operator, leaves and buckets; for derivatives, the number of the call that is differentiated; in
graphs, the position of that call among the traced calls; and flags, which are set if this rank
can't take part, or asks all ranks to stop. All ranks read the same rows, so they come to the same
decision. If rows differ in more than requests to stop, ranks exchange descriptions of their calls,
and all of them raise: no data has moved, and the communicator stays usable. Numbers and positions
are compared only between ranks that have one, because one rank may run a graph and another may run
eagerly. The first bucket is packed during the all-gather.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fddp.core.protocol.differences import LEAVES, format_pair, leaf_difference
from fddp.core.protocol.messages import AnyOf, Schema, decode, malformed_message_error
from fddp.errors import DesyncError, FddpError, PeerError, error_text
from fddp.runtime.inputs import outside_tracing

if TYPE_CHECKING:
    from torch import Tensor

    from fddp.collectives.calls import Call
    from fddp.collectives.communicator import Communicator
    from fddp.collectives.operator_program import GroupPosition
    from fddp.transport import Work

_WORD = 4  # fingerprint, number, position, flags
_FAILED, _STOP = 1, 2  # flags: this rank can't take part; it asks all ranks to stop
_LENGTH_BYTES = 8
_MAX_BYTES = 2**31  # of one rank's description; more is treated as malformed

_DETAILS: Schema = (
    str,  # operator
    AnyOf(((), ([str], int))),  # axes and number of ranks; empty for `check_replicas`
    int,  # root
    bool,  # tiled
    LEAVES,
    [[int]],  # buckets
)
_CALL: dict[str, Schema] = {
    "text": str,
    "details": _DETAILS,
    "roles": [str],
    "call": (int, int),
}
_REPORT = AnyOf(({"error": str, "text": str}, _CALL, {**_CALL, "digests": [int], "when": str}))


def begin(call: Call, rows: Tensor, *, wait_soon: bool) -> Work:
    """Start the handshake of a call: the all-gather of four integers of each rank in `rows`."""
    # Ranks that meet along some axes are not all, and could not stop together.
    flags = _STOP if call.communicator.requests.asked and not call.program.place.axes else 0
    own = (_fingerprint(call), *_numbers(call), flags)
    return _send_row(call.communicator, call.program.place, rows, own, wait_soon=wait_soon)


def check(call: Call, rows: Tensor) -> None:
    """Check that all ranks call the same operator, once the handshake is complete, and note a
    request to stop.

    Raises:
        DesyncError: they call different ones. Raised on every rank of the group.
        PeerError: another rank can't take part. Raised on every rank that can.
    """
    found = rows.tolist()
    if found != found[:_WORD] * call.program.place.size:
        _resolve_mismatch(call, found)
    elif not found[_WORD - 1]:  # nor any other
        return
    if any(found[_WORD - 1 :: _WORD]):
        call.communicator.requests.agree()


def abort_handshake(
    communicator: Communicator, place: GroupPosition, what: str, error: Exception
) -> NoReturn:
    """Report to the other ranks that this rank can't take part, then raise `error`.

    Args:
        communicator: the communicator on which the other ranks wait.
        place: the ranks that meet.
        what: the operator and its call site.
        error: the reason on this rank.
    """
    if place.size > 1 and communicator.closed is None:
        try:
            with outside_tracing():
                rows = rows_of(communicator, place)
                _send_row(communicator, place, rows, (0, -1, -1, _FAILED)).wait(what)
                _exchange(communicator, place, what, {"error": error_text(error), "text": what})
        except FddpError as failure:
            raise error from failure
    raise error


def rows_of(communicator: Communicator, place: GroupPosition) -> Tensor:
    """Memory of the handshakes of the ranks that meet: four integers of each, by rank."""
    transport = communicator.transport

    def make() -> Tensor:
        return transport.empty(place.size * _WORD, torch.int64, transport.control_device)

    return communicator.cached("rows", place, make)


def _send_row(
    communicator: Communicator,
    place: GroupPosition,
    rows: Tensor,
    own: tuple[int, int, int, int],
    *,
    wait_soon: bool = True,
) -> Work:
    if not place.axes:
        communicator.begun += 1
    mine = torch.tensor(own, dtype=torch.int64, device="cpu")
    rows[place.own * _WORD : (place.own + 1) * _WORD].copy_(mine)
    return communicator.transport.all_gather_in_place(rows, axes=place.axes, wait_soon=wait_soon)


def _numbers(call: Call) -> tuple[int, int]:
    """Number and position of the call that is differentiated; -1 if unknown."""
    if not call.roles:
        return -1, -1
    of = call.original
    return -1 if of.number is None else of.number, -1 if of.position is None else of.position


def _fingerprint(call: Call) -> int:
    """Signed 64-bit hash of program and roles, equal on ranks that may run together."""
    known: dict[tuple[str, ...], int] = call.program.__dict__.setdefault("_fingerprints", {})
    found = known.get(call.roles)
    if found is None:
        text = call.program.digest + "/".join(call.roles).encode()
        digest = hashlib.sha256(text).digest()
        found = known[call.roles] = int.from_bytes(digest[:8], "big", signed=True)
    return found


def _resolve_mismatch(call: Call, flat_rows: list[int]) -> None:
    """Decide about rows that differ, from data that is the same on all ranks; raise if needed."""
    place = call.program.place
    rows = [flat_rows[k : k + _WORD] for k in range(0, len(flat_rows), _WORD)]
    fingerprints, numbers, positions, flags = (set(column) for column in zip(*rows, strict=True))
    are_one_call = len(numbers - {-1}) < 2 and len(positions - {-1}) < 2
    if len(fingerprints) == 1 and are_one_call and _FAILED not in flags:
        return
    mine = {
        "text": call.text,
        "details": call.program.details,
        "roles": call.roles,
        "call": _numbers(call),
    }
    reports = _exchange(call.communicator, place, call.text, mine)
    raise DesyncError(_difference(reports))


def compare(
    communicator: Communicator, what: str, fingerprint: int, value: int, mine: dict[str, Any]
) -> dict[int, dict[str, Any]] | None:
    """Compare one value over all ranks of a communicator, in the all-gather of a handshake.

    Args:
        communicator: the communicator; all its ranks call this.
        what: the call, for errors.
        fingerprint: signed 64-bit integer that must be equal on all ranks.
        value: signed 64-bit integer that may differ.
        mine: this rank's report, exchanged only if something differs; has `text` and `details` as
            the reports of operators.

    Returns:
        None if all ranks have the same value, else the report of each rank.

    Raises:
        DesyncError: ranks are in different calls. Raised on every rank.
        PeerError: another rank can't take part. Raised on every rank that can.
        RankLostError, SyncTimeoutError: a rank did not arrive.
    """
    place = communicator.place(())
    if place.size == 1:
        return None
    rows = rows_of(communicator, place)
    _send_row(communicator, place, rows, (fingerprint, value, -1, 0)).wait(what)
    words = rows.tolist()
    if words == words[:_WORD] * place.size:
        return None
    reports = _exchange(communicator, place, what, {"roles": [], "call": [-1, -1], **mine})
    if any(_key(other) != _key(reports[0]) for other in reports.values()):
        raise DesyncError(_difference(reports))
    return reports


def _key(report: dict[str, Any]) -> tuple[Any, ...]:
    return (report["details"], report["roles"], report["call"])


def _difference(reports: Mapping[int, dict[str, Any]]) -> str:
    ranks = list(reports)
    first = reports[ranks[0]]
    other = next((r for r in ranks if _key(reports[r]) != _key(first)), ranks[-1])
    second = reports[other]
    reason = _reason(ranks[0], first, other, second)
    where = "; ".join(f"rank {rank}: {t['text']}" for rank, t in reports.items())
    return (
        f"ranks met in different operators: {where}; {reason}; all ranks must call the same "
        f"operators on trees of the same structure in the same order (do not branch on data of one "
        f"rank); nothing was communicated"
    )


def _reason(one: int, first: dict[str, Any], two: int, second: dict[str, Any]) -> str:
    names = ("operator", "ranks", "root", "choice of tiled")
    for name, mine, theirs in zip(names, first["details"], second["details"], strict=False):
        if mine != theirs:
            return f"the {name} is {format_pair(one, mine, two, theirs)}"
    difference = leaf_difference(one, first["details"][4], two, second["details"][4])
    if difference is not None:
        return difference
    if first["details"][5] != second["details"][5]:
        return "the leaves are alike, but not the buckets: pass the same plan on every rank"
    if first["roles"] != second["roles"]:
        return "ranks differentiate it in different ways"
    return (
        f"rank {one} differentiates another call of it than rank {two}: one of them does not "
        f"differentiate both calls"
    )


def _exchange(
    communicator: Communicator, place: GroupPosition, what: str, mine: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """Reports of the ranks that meet, by rank of the communicator.

    Raises:
        PeerError: another rank can't take part, and this one can.
    """
    texts = gather_texts(communicator, place, what, json.dumps(mine, default=str).encode())
    ranks: Sequence[int] = range(place.size)
    if place.axes and communicator.topology is not None:
        ranks = communicator.topology.group(place.axes, communicator.rank)
    reports = {}
    for rank, text in zip(ranks, texts, strict=True):
        try:
            reports[rank] = decode(text, _REPORT)
        except ValueError as error:
            raise malformed_message_error(rank, what, error) from error
    failures = {rank: t["error"] for rank, t in reports.items() if t.get("error")}
    if failures and "error" not in mine:
        lines = [
            f"{reports[r]['text']}: rank {r} can't take part: {e}" for r, e in failures.items()
        ]
        raise PeerError(
            f"{what}, on rank {communicator.rank}, failed because of another rank: "
            f"{'; '.join(lines)}; nothing was communicated, and the communicator remains usable",
            failures,
        )
    return reports


def gather_texts(
    communicator: Communicator, place: GroupPosition, what: str, payload: bytes
) -> list[bytes]:
    """Payloads of the ranks that meet, in their order. Lengths may differ."""
    lengths = gather(communicator, place, what, len(payload).to_bytes(_LENGTH_BYTES, "big"))
    sizes = [int.from_bytes(text, "big") for text in lengths]
    if max(sizes) > _MAX_BYTES:
        raise DesyncError(
            f"{what}: ranks announced reports of {sizes} bytes, more than {_MAX_BYTES}; run the "
            f"same version of fddp on every rank"
        )
    texts = gather(communicator, place, what, payload.ljust(max(sizes), b"\0"))
    return [text[:size] for text, size in zip(texts, sizes, strict=True)]


def gather(
    communicator: Communicator, place: GroupPosition, what: str, payload: bytes
) -> list[bytes]:
    """Payloads of the ranks that meet, in their order. Lengths must be equal."""
    n, width = place.size, len(payload)
    rows = torch.zeros(n, width, dtype=torch.uint8, device="cpu")
    rows[place.own].copy_(torch.tensor(list(payload), dtype=torch.uint8, device="cpu"))
    flat = rows.view(-1).to(communicator.transport.control_device)
    communicator.transport.all_gather_in_place(flat, axes=place.axes).wait(what)
    return [row.numpy().tobytes() for row in flat.cpu().view(n, width)]
