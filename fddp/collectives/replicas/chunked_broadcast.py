"""Broadcast of bytes in chunks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fddp.core.protocol.messages import malformed_message_error
from fddp.transport.base import Transport

PIECE_BYTES = 32 * 1024 * 1024
"""Size of a chunk, and of the temporary buffer of a broadcast."""

MOST_TEXT_BYTES = 2**31
"""Longer texts are rejected as malformed before memory is allocated for them."""


def chunks(sizes: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Split the concatenation of runs of these sizes into chunks of at most `most` bytes.

    Yields:
        Ranges of bytes: the index of a run, the first byte, and the byte after the last.

    Example:
        >>> [*chunks([3, 0, 6], 4)]
        [[(0, 0, 3), (2, 0, 1)], [(2, 1, 5)], [(2, 5, 6)]]
    """
    piece: list[tuple[int, int, int]] = []
    room = most
    for run, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            piece.append((run, start, stop))
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
    """Write rank `src`'s bytes into the tensors of all ranks. A collective call.

    Args:
        transport: the transport.
        runs: tensors of bytes, shape `(n,)`, of the same sizes on all ranks.
        src: source rank; its tensors are only read.
        what: description of the data, for errors.
        keeps: False if this rank takes part but does not need the bytes; its tensors are not
            written.
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
    """Rank `src`'s ASCII text on all ranks, which know its length. A collective call.

    Raises:
        DesyncError: the text is not ASCII, or `length` is invalid. Raised on every rank.
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
