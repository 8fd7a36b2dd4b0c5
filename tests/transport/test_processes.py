"""Processes of other ranks: which are known to run on this host, and which of these have ended."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from fddp.transport.liveness import failure_detector, processes
from fddp.transport.liveness.bounded_store import StoreClientThread
from fddp.transport.liveness.failure_detector import FailureDetector
from fddp.transport.liveness.membership import Membership
from fddp.transport.liveness.processes import Look, process_behind
from fddp.transport.liveness.status import StatusBoard
from fddp.transport.shm.fd_passing import FdConnection, FdListener


def test_a_socket_proves_a_process() -> None:
    listener = FdListener()
    found = process_behind(listener.name)
    assert found is not None
    assert found.pid == os.getpid()
    assert not processes.has_ended(found, processes.look_at(found))
    listener.close()
    assert process_behind(listener.name) is None, "its end proves nothing"


def test_a_process_that_exits_is_marked_by_the_kernel() -> None:
    """From the start of its end, which takes long if much memory is freed, until it is reaped."""
    assert not processes.look_at(processes.Process(os.getpid())).exiting
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.look_at(processes.Process(child.pid)).exiting
    child.wait()
    assert not processes.look_at(processes.Process(child.pid)).exists


def test_a_process_of_another_namespace_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives it the number 0."""
    begin = FdConnection.__init__

    def unseen(self: FdConnection, connected: socket.socket) -> None:
        begin(self, connected)
        self.process = 0

    monkeypatch.setattr(FdConnection, "__init__", unseen)
    listener = FdListener()
    assert process_behind(listener.name) is None
    listener.close()


@contextlib.contextmanager
def detectors(boot_id: str) -> Iterator[FailureDetector]:
    """That of rank 0, to whose opening rank 1 has come as well."""
    store, both = dist.HashStore(), []
    for rank in range(2):
        membership, board = Membership(store, rank, 2, StoreClientThread()), StatusBoard()
        detector = FailureDetector(membership, board.open("0/1"), [0, 1], [0, 1], 8.0)
        detector._boot_id = boot_id
        detector.listen(rank)
        both.append(detector)
    both[0].refresh_processes()
    yield both[0]
    for detector in both:
        detector.stop_listening()


@pytest.mark.parametrize("shares_host", [True, False])
def test_a_pid_of_a_cloned_machine_says_nothing(
    shares_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same boot id, and the other rank's PID is free here."""
    if not shares_host:
        monkeypatch.setattr(processes, "connect", lambda name: None)
    monkeypatch.setattr(failure_detector, "look_at", lambda process: Look(False))
    with detectors("a boot id") as first:
        assert first.ended() == ((0, 1) if shares_host else ())
        assert first.ended_or_stopped() == first.ended()


def test_without_a_boot_id_no_process_is_looked_up() -> None:
    with detectors("") as first:
        assert first.ended() == ()
        assert first._listener is None
