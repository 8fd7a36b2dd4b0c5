"""Exchange of plain values between ranks, on the communicator of operators."""

from __future__ import annotations

import json
from typing import Any

import torch

from fddp.collectives.communicator import Communicator, communicator_of
from fddp.collectives.operators import all_gather
from fddp.core.protocol.messages import Schema, decode, decode_all
from fddp.transport import Group


def exchange(
    value: object,
    schema: Schema,
    group: Group | Communicator | None = None,
    *,
    topic: str = "values",
) -> list[Any]:
    """Return the values of all ranks, by rank; a collective call, as two of `all_gather`.

    Args:
        value: value of this rank, of JSON types.
        schema: schema of every rank's value: a type, None, a literal string, a list of any length,
            a tuple of fixed length, an object with exactly these fields, `optional` or `MappingOf`.
        group: as for `all_gather`.
        topic: name of the values, for errors.

    Raises:
        DesyncError: a rank sent a value that does not fit the schema, on every rank; or as
            `all_gather`.
        Exception: as `all_gather`.

    Example:
        >>> import fddp
        >>> fddp.loopback(2, lambda group: exchange({"rank": group.rank}, {"rank": int}, group))[0]
        [{'rank': 0}, {'rank': 1}]
    """
    ranks = communicator_of(group, None)
    device = ranks.transport.control_device
    text = json.dumps(value).encode()
    lengths: list[int] = all_gather(torch.tensor(len(text), device=device), ranks).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = all_gather(padded.to(device), ranks).cpu().numpy()
    texts = [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
    return decode_all(texts, lambda each: decode(each, schema), topic)
