"""Exchange of byte strings between ranks of a transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from fddp.core.protocol.messages import malformed_message_error
from fddp.errors import DesyncError, InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fddp.transport.subgroups import Axes
    from fddp.transport.work import Work

_TOPIC_BYTES = 16
_LENGTH_BYTES = 8
_INLINE_BYTES = 1000  # of the payload, sent together with topic and length
_MAX_PAYLOAD_BYTES = 2**31  # longer payloads are rejected before memory is allocated


class Gatherer(Protocol):
    """The part of a transport that this module uses."""

    control_device: torch.device

    def all_gather(self, tensor: Tensor, *, axes: Axes = ..., fixed_size: bool = ...) -> Work: ...


def exchange_bytes(
    transport: Gatherer, payload: bytes, topic: str, axes: Axes, ranks: Sequence[int]
) -> list[bytes]:
    """Implement `Transport.exchange`; `ranks` are those along `axes`."""
    if len(topic.encode()) > _TOPIC_BYTES:
        raise InternalError(f"exchange topic {topic!r} has more than {_TOPIC_BYTES} bytes")
    what = f"exchange of {topic} ({len(payload)} bytes)"
    length = len(payload).to_bytes(_LENGTH_BYTES, "big")
    head = topic.encode().ljust(_TOPIC_BYTES) + length + payload[:_INLINE_BYTES]
    width = _TOPIC_BYTES + _LENGTH_BYTES + _INLINE_BYTES
    received = gather_bytes(transport, head, width, what, axes)
    topics = [text[:_TOPIC_BYTES].decode(errors="replace").strip() for text in received]
    for rank, other in zip(ranks, topics, strict=True):
        if other != topics[0]:
            raise DesyncError(
                f"rank {ranks[0]} is about to compare {topics[0]} where rank {rank} compares "
                f"{other}: all ranks must make the same calls in the same order"
            )
    received = [text[_TOPIC_BYTES:] for text in received]
    lengths = [int.from_bytes(text[:_LENGTH_BYTES], "big") for text in received]
    longest = max(lengths)
    if longest > _MAX_PAYLOAD_BYTES:
        raise malformed_message_error(
            ranks[lengths.index(longest)], topics[0], ValueError(f"it has {longest} bytes")
        )
    if longest <= _INLINE_BYTES:
        whole = [text[_LENGTH_BYTES:] for text in received]
    else:
        whole = gather_bytes(transport, payload, longest, what, axes)
    return [text[:length] for text, length in zip(whole, lengths, strict=True)]


def gather_bytes(
    transport: Gatherer, payload: bytes, width: int, what: str, axes: Axes = ()
) -> list[bytes]:
    """Return the payloads of the ranks along `axes`, each zero-padded to `width` bytes; blocks."""
    padded = torch.frombuffer(bytearray(payload.ljust(width, b"\0")), dtype=torch.uint8)
    work = transport.all_gather(padded.to(transport.control_device), axes=axes, fixed_size=True)
    work.wait(what)
    return [row.cpu().numpy().tobytes() for row in work.results]
