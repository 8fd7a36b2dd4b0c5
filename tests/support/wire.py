"""Bytes that this process has sent and received over TCP, as the kernel counts them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import NamedTuple

# Offsets into `struct tcp_info`, which is part of Linux's interface to programs.
_BYTES_RECEIVED, _BYTES_SENT, _BYTES_SENT_AGAIN = _OFFSETS = (128, 200, 208)


class Traffic(NamedTuple):
    """Bytes of payload over TCP.

    Attributes:
        sent: each once, whatever had to be sent again.
        received: from the peers.
    """

    sent: int
    received: int


def connections(*, except_port: int | None = None) -> dict[str, Traffic]:
    """Return the payload that each open TCP connection of this process has carried; Linux only.

    Connections of which `except_port` is an end are left out, as those to a store, which a thread
    of each rank polls at times of its own.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:
            continue  # closed meanwhile, as the descriptor of this listing is
        try:
            inode = os.readlink(f"/proc/self/fd/{duplicate}")
            if not inode.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(duplicate)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.type != socket.SOCK_STREAM or except_port in _ports(connection):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        finally:
            os.close(duplicate)
        if len(info) < _BYTES_SENT_AGAIN + 8:
            raise OSError("this kernel does not count bytes over TCP; it takes Linux 4.19 or later")
        at = {offset: struct.unpack_from("Q", info, offset)[0] for offset in _OFFSETS}
        found[inode] = Traffic(at[_BYTES_SENT] - at[_BYTES_SENT_AGAIN], at[_BYTES_RECEIVED])
    return found


def _ports(connection: socket.socket) -> list[int]:
    ports = [connection.getsockname()[1]]
    with contextlib.suppress(OSError):  # not connected
        ports.append(connection.getpeername()[1])
    return ports


def traffic_since(before: dict[str, Traffic], *, except_port: int | None = None) -> Traffic:
    """Return what the connections that are open now have carried since `connections()`, with the
    same `except_port`.

    A connection closed since then is left out. The peer may close it, too: let no rank close a
    group before all have called this.

    Example:
        >>> server = socket.create_server(("127.0.0.1", 0))
        >>> client = socket.create_connection(server.getsockname())
        >>> connection, _ = server.accept()
        >>> before = connections()
        >>> client.sendall(bytes(1000))
        >>> data = connection.recv(1000, socket.MSG_WAITALL)
        >>> traffic_since(before)
        Traffic(sent=1000, received=1000)
        >>> port = server.getsockname()[1]
        >>> traffic_since({}, except_port=port)
        Traffic(sent=0, received=0)
        >>> client.close()
        >>> traffic_since(before).sent
        0
        >>> for each in (connection, server):
        ...     each.close()
    """
    sent = received = 0
    for inode, now in connections(except_port=except_port).items():
        then = before.get(inode, Traffic(0, 0))
        sent += now.sent - then.sent
        received += now.received - then.received
    return Traffic(sent, received)
