"""Open files handed from process to process of one host and one user.

The sockets for it are abstract: no file stands for them, so that nothing is left behind, and they
are in reach only within their network namespace. Their names are random, but other users of the
host can list them; so each side asks the kernel who is at the other end before anything is given.

Nothing here waits: whoever reads knows by other means that what it reads was sent.
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

    from typing_extensions import Self

MOST_DESCRIPTORS = 240  # in one message; the kernel passes 253
_MOST_BYTES = 4096
_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group


class ForeignUserError(PermissionError):
    """The process at the other end runs as another user."""


class FdMessage(NamedTuple):
    """What was sent at once; the descriptors are the receiver's to close."""

    note: bytes
    descriptors: tuple[int, ...]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class FdConnection:
    """A connection to another process of this user."""

    def __init__(self, connected: socket.socket) -> None:
        """Takes the socket over; raises `ForeignUserError` if another user is at its other end."""
        self._socket = connected
        raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.process, user, _ = _CREDENTIALS.unpack(raw)
        if user != os.geteuid():
            connected.close()
            raise ForeignUserError(
                f"process {self.process} runs as user {user}, and this one as {os.geteuid()}"
            )

    def send(self, note: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send copies of `descriptors`, of which there are at most `MOST_DESCRIPTORS`."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        self._socket.sendmsg([note], [rights] if descriptors else [], socket.MSG_DONTWAIT)

    def receive(self) -> FdMessage:
        """What was given first of all that was not taken; raises an OSError if nothing was."""
        room = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
        how = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        note, ancillary, flags, _ = self._socket.recvmsg(_MOST_BYTES, room, how)
        received = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received.frombytes(content[: len(content) - len(content) % received.itemsize])
        message = FdMessage(note, tuple(received))
        if not note or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            message.close()
            raise OSError(
                "not all that was sent arrived; the process may be out of descriptors (ulimit -n)"
                if note
                else "the other process closed its connection"
            )
        return message

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FdListener:
    """A socket to which other processes of this user can connect by its name.

    Attributes:
        name: random; whoever is to connect must be told.
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
        """All that have connected, but for processes of other users."""
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
    """A connection to the process whose `FdListener` has this name; None if none is in reach.

    Raises:
        ForeignUserError: it belongs to another user.
        OSError: it does not take connections.
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
