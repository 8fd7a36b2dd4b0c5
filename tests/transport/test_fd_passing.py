"""Open files from process to process: what arrives, and who is turned away."""

from __future__ import annotations

import os
import socket
import traceback
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest
import torch

from fddp.native import extension
from fddp.transport import open_transport
from fddp.transport.shm.fd_passing import (
    MOST_DESCRIPTORS,
    FdConnection,
    FdListener,
    ForeignUserError,
    connect,
)
from fddp.transport.shm.host_discovery import _hosts
from tests.support.process_resources import open_file_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.ranks import RankPool

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run as another user")


@pytest.fixture
def listener() -> Iterator[FdListener]:
    opened = FdListener()
    yield opened
    opened.close()


def ends_of(listener: FdListener) -> tuple[FdConnection, FdConnection]:
    """Both ends of a connection through `listener`."""
    line = connect(listener.name)
    assert line is not None
    (admitted,) = listener.accept()
    return line, admitted


def test_notes_and_files_arrive(listener: FdListener) -> None:
    mine, theirs = ends_of(listener)
    before = open_file_count()
    with ExitStack() as stack:
        stack.callback(mine.close)
        stack.callback(theirs.close)
        read, write = os.pipe()
        mine.send(b"an end", [write])
        mine.send(b"no file")
        os.close(write)
        message = theirs.receive()
        assert (message.note, len(message.descriptors)) == (b"an end", 1)
        assert not os.get_inheritable(message.descriptors[0])
        os.write(message.descriptors[0], b"through")
        message.close()
        assert os.read(read, 100) == b"through"
        assert os.read(read, 100) == b"", "all copies are closed"
        os.close(read)
        assert theirs.receive() == (b"no file", ())
        with pytest.raises(BlockingIOError):
            theirs.receive()
        mine.close()
        with pytest.raises(OSError, match="the other process closed its connection"):
            theirs.receive()
    assert open_file_count() == before - 2


def test_a_message_has_at_most_so_many_descriptors(listener: FdListener) -> None:
    """Those beyond are an error and are closed, as where a process may open no more files."""
    mine, theirs = ends_of(listener)
    with closing(mine), closing(theirs):
        before = open_file_count()
        mine.send(b"many", [0] * MOST_DESCRIPTORS)
        message = theirs.receive()
        assert len(message.descriptors) == MOST_DESCRIPTORS
        message.close()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, bytes(4 * (MOST_DESCRIPTORS + 5)))]
        with mine._socket.dup() as raw:
            raw.sendmsg([b"too many"], rights)
        with pytest.raises(OSError, match=r"the message was truncated; .* \(ulimit -n\)"):
            theirs.receive()
        assert open_file_count() == before


def test_listeners_are_reached_by_unguessable_names(listener: FdListener) -> None:
    with closing(FdListener()) as other:
        assert other.name != listener.name
    assert len(listener.name) == 32, "128 bits"
    assert connect("unknown") is None
    listener.close()
    assert connect(listener.name) is None


# Other users


def as_nobody(do: Callable[[], None]) -> None:
    """Run `do` in a process of another user; fail if it raises."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            do()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def turned_away_on_rank(rank: int, world_size: int) -> None:
    listener = FdListener()

    def knock() -> None:
        with pytest.raises(ForeignUserError, match=f"as user 0, and this one as {NOBODY}"):
            connect(listener.name)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.connect(f"\0fddp-{listener.name}")  # one that does not look who answers
            raw.send(b"hello")

    as_nobody(knock)
    assert list(listener.accept()) == []
    listener.close()


@AS_ROOT
def test_another_user_is_turned_away(ranks: RankPool) -> None:
    ranks.run(1, turned_away_on_rank)  # JAX, which may be imported here, warns of forks


def guarded_on_rank(rank: int, world_size: int) -> None:
    with open_transport(timeout_s=20) as transport:
        assert transport.name == "shm"
        tensor = transport.empty(1000, torch.float32, torch.device("cpu")).fill_(1.0)
        transport.exchange(b"memory is there")
        arena = transport._memory._arena  # type: ignore[attr-defined]
        owner, file, span = os.getpid(), os.dup(arena.fd), arena.span

        def pry() -> None:
            theirs = [f"/proc/{owner}/fd/{arena.fd}", f"/proc/{owner}/mem"]
            for path in (*theirs, f"/proc/self/fd/{file}"):
                with pytest.raises(PermissionError):
                    os.open(path, os.O_RDWR)
            with pytest.raises(PermissionError):
                os.listdir(f"/proc/{owner}/map_files")
            with pytest.raises((ValueError, OSError), match=r"user|uid|own"):
                extension.compiled.ShmView(file, span)

        as_nobody(pry)
        os.close(file)
        transport.all_reduce(tensor).wait("the sum")


@AS_ROOT
def test_another_user_cannot_open_the_memory(ranks: RankPool) -> None:
    ranks.run(2, guarded_on_rank)


# Hosts


def test_hosts_follow_leaders_unless_a_member_has_a_problem() -> None:
    assert _hosts([0, 0, 2, 0], {}) == ((0, 1, 3), (0, 1, 3), (2,), (0, 1, 3))
    assert _hosts([0, 0, 2, 2], {3: "lost its way"}) == ((0, 1), (0, 1), (2,), (3,))
    assert _hosts([0, 0, None, 0], {2: "no socket"}) == ((0, 1, 3), (0, 1, 3), (2,), (0, 1, 3))
    # Rank 2 does not reach rank 0, but rank 1, which is no leader.
    assert _hosts([0, 0, 1], {}) == ((0, 1), (0, 1), (2,))
