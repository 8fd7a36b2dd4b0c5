"""One rank's bytes on all ranks, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fddp.core.protocol.messages import malformed_message_error
from fddp.transport.base import Transport

PIECE_BYTES = 32 * 1024 * 1024
"""How much travels at once; as much memory is needed meanwhile."""

MOST_TEXT_BYTES = 2**31
"""Longer texts are taken for nonsense, before there is memory for them."""


class ByteRange(NamedTuple):
    """Some bytes of one of several runs.

    Attributes:
        run: which one.
        start: first byte.
        stop: byte after the last.
    """

    run: int
    start: int
    stop: int


def chunks(sizes: Sequence[int], most: int) -> Iterator[list[ByteRange]]:
    """Cuts runs of these sizes, one behind the other, into pieces of at most `most` bytes.

    Example:
        >>> [[tuple(stretch) for stretch in piece] for piece in chunks([3, 0, 6], 4)]
        [[(0, 0, 3), (2, 0, 1)], [(2, 1, 5)], [(2, 5, 6)]]
    """
    piece: list[ByteRange] = []
    room = most
    for run, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            piece.append(ByteRange(run, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


def broadcast_bytes_(
    transport: Transport, runs: Sequence[Tensor], src: int, what: str, *, keeps: bool = True
) -> None:
    """Writes rank `src`'s bytes into those of all ranks; a collective call.

    Args:
        transport: carries them.
        runs: tensors of bytes, shape `(n,)`, of the same sizes on all ranks; rank `src` reads its.
        src: whose bytes are passed on.
        what: in words, for errors.
        keeps: whether this rank writes them; False where its runs have them already.
    """
    sizes = [run.numel() for run in runs]
    longest = min(PIECE_BYTES, sum(sizes))
    memory = transport.empty(longest, torch.uint8, transport.control_device)
    for piece in chunks(sizes, PIECE_BYTES):
        end, places = 0, []
        for run, start, stop in piece:
            places.append((runs[run][start:stop], slice(end, end + stop - start)))
            end += stop - start
        travelling = memory[:end]
        if transport.rank == src:
            for part, place in places:
                travelling[place].copy_(part)
        transport.broadcast(travelling, src).wait(what)
        if keeps and transport.rank != src:
            for part, place in places:
                part.copy_(travelling[place])


def broadcast_text(transport: Transport, text: str, length: int, src: int, what: str) -> str:
    """Rank `src`'s text on all ranks, which know its length in ASCII; a collective call.

    Raises:
        DesyncError: it is no such text, or `length` can't be one's; on every rank.
    """
    if not 0 <= length <= MOST_TEXT_BYTES:
        raise malformed_message_error(src, what, ValueError(f"its text has {length} bytes"))
    if transport.rank == src:
        run = torch.frombuffer(bytearray(text.encode("ascii")), dtype=torch.uint8)
    else:
        run = torch.empty(length, dtype=torch.uint8, device="cpu")
    broadcast_bytes_(transport, [run], src, what)
    try:
        return run.numpy().tobytes().decode("ascii")
    except ValueError as error:
        raise malformed_message_error(src, what, error) from error
