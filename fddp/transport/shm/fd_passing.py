"""File descriptors passed between processes of one host and one user.

The sockets are abstract: no file remains, and they are reachable only within their network
namespace. Their names are random, but other users of the host can list them. Each side therefore
verifies the user of its peer through the kernel before it sends anything.

All sockets are non-blocking: a process reads only after it knows that the data was sent.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_DESCRIPTORS = 240  # in one message; the kernel passes 253
_MAX_NOTE_BYTES = 4096
_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group


class ForeignUserError(PermissionError):
    """The process at the other end runs as another user."""


class FdMessage(NamedTuple):
    """One message. The receiver closes the descriptors."""

    note: bytes
    descriptors: tuple[int, ...]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class FdConnection:
    """A connection to another process of this user."""

    def __init__(self, connected: socket.socket) -> None:
        """Take ownership of a socket. Raises ForeignUserError if its peer is another user's."""
        self._socket = connected
        raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.process, user, _ = _CREDENTIALS.unpack(raw)
        if user != os.geteuid():
            connected.close()
            raise ForeignUserError(
                f"process {self.process} runs as user {user}, and this one as {os.geteuid()}"
            )

    def send(self, note: bytes, descriptors: Sequence[int] = ()) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        self._socket.sendmsg([note], [rights] if descriptors else [], socket.MSG_DONTWAIT)

    def receive(self) -> FdMessage:
        """Return the next message. Raises OSError if there is none."""
        # Not `socket.recv_fds`, which ignores its flags.
        room = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
        wanted = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        note, ancillary, flags, _ = self._socket.recvmsg(_MAX_NOTE_BYTES, room, wanted)
        received = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received.frombytes(content[: len(content) - len(content) % received.itemsize])
        message = FdMessage(note, tuple(received))
        if not note or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            message.close()
            raise OSError(
                "the message was truncated; this process may be out of descriptors (ulimit -n)"
                if note
                else "the other process closed its connection"
            )
        return message

    def close(self) -> None:
        self._socket.close()


class FdListener:
    """A socket to which other processes of this user can connect by its name.

    Attributes:
        name: random name, to be passed to `connect`.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            self._socket.bind(_address(self.name))
            self._socket.listen(socket.SOMAXCONN)
        except OSError:
            self._socket.close()
            raise

    def accept(self) -> Iterator[FdConnection]:
        """Yield pending connections. Those of other users are closed."""
        while True:
            try:
                connected, _ = self._socket.accept()
            except BlockingIOError:
                return
            with contextlib.suppress(ForeignUserError):
                yield FdConnection(connected)

    def close(self) -> None:
        self._socket.close()


def connect(name: str) -> FdConnection | None:
    """Return a connection to the `FdListener` of this name. None if it is not reachable.

    Raises:
        ForeignUserError: the listener belongs to another user.
        OSError: it does not accept connections.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        sock.connect(_address(name))
    except ConnectionRefusedError:
        sock.close()
        return None
    except OSError:
        sock.close()
        raise
    return FdConnection(sock)


def _address(name: str) -> str:
    return f"\0fddp-{name}"
