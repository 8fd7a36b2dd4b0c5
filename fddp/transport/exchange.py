"""Exchange of texts of any length between ranks, in gathers of fixed size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fddp.core.protocol.messages import malformed_message_error
from fddp.errors import DesyncError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TOPIC_BYTES = 16
_LENGTH_BYTES = 8
_INLINE_BYTES = 1000  # of the payload, sent together with topic and length
_MAX_PAYLOAD_BYTES = 2**31  # longer payloads are rejected before memory is allocated


def exchange_texts(
    gather: Callable[[bytes, int], list[bytes]], payload: bytes, topic: str, ranks: Sequence[int]
) -> list[bytes]:
    """Return the payloads of `ranks`; arguments and errors as for `Transport.exchange`.

    Args:
        gather: returns the bytes of all ranks, each zero-padded to a width, which is the same on
            all of them.
        payload: this rank's bytes.
        topic: subject of the exchange.
        ranks: participants, for error texts.
    """
    if len(topic.encode()) > _TOPIC_BYTES:
        raise InternalError(f"exchange topic {topic!r} has more than {_TOPIC_BYTES} bytes")
    length = len(payload).to_bytes(_LENGTH_BYTES, "big")
    head = topic.encode().ljust(_TOPIC_BYTES) + length + payload[:_INLINE_BYTES]
    received = gather(head, _TOPIC_BYTES + _LENGTH_BYTES + _INLINE_BYTES)
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
        whole = gather(payload, longest)
    return [text[:length] for text, length in zip(whole, lengths, strict=True)]
