"""Times of the TCP connections between ranks.

All ranks wait alike for a slow link, so that their waits do not show which it is. But the kernel
counts for each connection the time in which data that was sent has not been acknowledged. This time
is long between two ranks of which one has a slow link, and short between others. As all times of a
monitor, it is a duration on one clock. The connections of gloo, and those of NCCL over sockets, are
found by their addresses. Shared memory and RDMA have none.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fddp.extend import Schema

_LEAST_BYTES = 1000.0  # per step, between two ranks; other connections count as idle
_LEAST_SHARE = 0.1  # the same, of the bytes of the rank's busiest peer
_LEAST_PEERS = 2  # with one, either end may be the slow one
_ACKED = struct.Struct("=Q"), 120  # tcpi_bytes_acked and its offset, as in linux/tcp.h
_BUSY = struct.Struct("=QQ"), 168  # tcpi_busy_time, tcpi_rwnd_limited

#: addresses of both ends of a connection, this rank's first
Ends = tuple[str, str]


class Sent(NamedTuple):
    """Data that a connection has sent.

    Attributes:
        ends: both addresses, this rank's first.
        nbytes: acknowledged bytes.
        busy_s: seconds in which sent data was not acknowledged, although the receiver had memory
            for more.
    """

    ends: Ends
    nbytes: float
    busy_s: float

    @classmethod
    def from_message(cls, values: Sequence[Any]) -> Sent:
        """Return the data whose values fit `SENT`."""
        (own, other), nbytes, busy_s = values
        return cls((own, other), nbytes, busy_s)


#: data of some connections
SENT: Schema = [((str, str), float, float)]


def sockets() -> Iterator[tuple[Ends, socket.socket]]:
    """Connected TCP sockets of this process, closed as soon as the next one is asked for; none
    except on Linux."""
    if sys.platform != "linux":
        return
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as end:
                if (
                    end.family in (socket.AF_INET, socket.AF_INET6)
                    and end.type == socket.SOCK_STREAM
                ):
                    yield (_address(end.getsockname()), _address(end.getpeername())), end
        except OSError:  # closed meanwhile, or not connected
            continue


def sent_so_far() -> dict[Ends, Sent]:
    """Return the data that each TCP connection of this process has sent."""
    found: dict[Ends, Sent] = {}
    for ends, end in sockets():
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) >= _BUSY[1] + _BUSY[0].size:  # since Linux 4.10
            (nbytes,) = _ACKED[0].unpack_from(info, _ACKED[1])
            busy_us, full_us = _BUSY[0].unpack_from(info, _BUSY[1])
            found[ends] = Sent(ends, nbytes, 1e-6 * max(0, busy_us - full_us))
    return found


def _address(address: Any) -> str:
    # A socket that serves IPv4 and IPv6 writes IPv4 addresses in another form.
    return f"{address[0].removeprefix('::ffff:')}:{address[1]}"


def sent_per_step(before: Mapping[Ends, Sent], now: Mapping[Ends, Sent], steps: int) -> list[Sent]:
    """Return the data that each connection has sent per step, in so many steps.

    Example:
        >>> ends = ("10.0.0.1:4000", "10.0.0.2:5000")
        >>> sent_per_step({ends: Sent(ends, 100, 1.0)}, {ends: Sent(ends, 500, 3.0)}, 2)
        [Sent(ends=('10.0.0.1:4000', '10.0.0.2:5000'), nbytes=200.0, busy_s=1.0)]
    """
    differences = []
    for ends, after in now.items():
        nothing = Sent(ends, 0.0, 0.0)
        first = before.get(ends, nothing)
        if steps and after.nbytes > first.nbytes:
            nbytes, busy_s = after.nbytes - first.nbytes, max(0.0, after.busy_s - first.busy_s)
            differences.append(Sent(ends, nbytes / steps, busy_s / steps))
    return differences


def link_times_s(ranks: Sequence[Sequence[Sent]]) -> list[float | None]:
    """Return for each rank the seconds per step in which data between it and another rank was in
    flight, in both directions: the lower median over the ranks with which it exchanges data. None
    if these are fewer than two.

    Args:
        ranks: data that the connections of each rank have sent per step.

    Example:
        >>> busy_s = {(0, 1): 0.001, (1, 2): 0.030, (2, 0): 0.040}  # the link of rank 2 is slow
        >>> link_times_s(
        ...     [
        ...         [
        ...             Sent((f"h{a}:{b}", f"h{b}:{a}"), 1e6, busy_s.get((a, b), 0.0))
        ...             for b in range(3)
        ...             if b != a
        ...         ]
        ...         for a in range(3)
        ...     ]
        ... )
        [0.001, 0.001, 0.03]
    """
    rank_at = {sent.ends: rank for rank, of in enumerate(ranks) for sent in of}
    nbytes: list[dict[int, float]] = [defaultdict(float) for _ in ranks]
    busy_s: list[dict[int, float]] = [defaultdict(float) for _ in ranks]
    for rank, of in enumerate(ranks):
        for (own, other), sent_bytes, sent_busy_s in of:
            peer = rank_at.get((other, own), rank)
            if peer != rank:
                for one, two in ((rank, peer), (peer, rank)):
                    nbytes[one][two] += sent_bytes
                    busy_s[one][two] += sent_busy_s
    times_s: list[float | None] = []
    for rank, of_peers in enumerate(nbytes):
        least = max(_LEAST_SHARE * max(of_peers.values(), default=0.0), _LEAST_BYTES)
        peers = [peer for peer, count in of_peers.items() if count >= least]
        has_enough = len(peers) >= _LEAST_PEERS
        times_s.append(
            statistics.median_low(busy_s[rank][peer] for peer in peers) if has_enough else None
        )
    return times_s
