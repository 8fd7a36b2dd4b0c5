"""Bytes that this process has sent and received over TCP, as the kernel counts them."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

# Offsets into `struct tcp_info`, which is part of Linux's interface to programs.
_BYTES_RECEIVED, _BYTES_SENT, _BYTES_SENT_AGAIN = _OFFSETS = (128, 200, 208)


class Traffic(NamedTuple):
    """Bytes of payload over this process's open TCP connections.

    Attributes:
        sent: each once, whatever had to be sent again.
        received: from them.
    """

    sent: int
    received: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)


def traffic() -> Traffic:
    """Return the payload carried by the TCP connections that are open now; Linux only.

    Example:
        >>> server = socket.create_server(("127.0.0.1", 0))
        >>> client = socket.create_connection(server.getsockname())
        >>> connection, _ = server.accept()
        >>> before = traffic()
        >>> client.sendall(bytes(1000))
        >>> data = connection.recv(1000, socket.MSG_WAITALL)
        >>> traffic() - before
        Traffic(sent=1000, received=1000)
        >>> for each in (client, connection, server):
        ...     each.close()
    """
    sent = received = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:
            continue  # closed meanwhile, as the descriptor of this listing is
        try:
            if not os.readlink(f"/proc/self/fd/{duplicate}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(duplicate)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.type != socket.SOCK_STREAM:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        finally:
            os.close(duplicate)
        if len(info) < _BYTES_SENT_AGAIN + 8:
            raise OSError("this kernel does not count bytes over TCP; it takes Linux 4.19 or later")
        at = {offset: struct.unpack_from("Q", info, offset)[0] for offset in _OFFSETS}
        sent += at[_BYTES_SENT] - at[_BYTES_SENT_AGAIN]
        received += at[_BYTES_RECEIVED]
    return Traffic(sent, received)
