"""Flights on signals that end a process, and what stays in the directory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import fddp
from tests.support.programs import run_python

# Forks of one process, each of which gets its signal in its own way.
ENDINGS = """
import ctypes, os, resource, signal, sys, threading
from pathlib import Path
import fddp

def ended_by(number):
    dumps(number)
    os.kill(os.getpid(), number)

def nested():
    dumps(signal.SIGTERM)
    ended_by(signal.SIGTERM)

def ignored():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ended_by(signal.SIGTERM)

def interrupted():
    def interrupt(path, target):
        Path.replace = replace
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(3):  # the handler runs between two of these
            pass
    dumps(signal.SIGUSR1)
    last = dumps(signal.SIGTERM)
    replace, Path.replace = Path.replace, interrupt
    last.write("when the signal comes")

def forked():
    dumps(signal.SIGTERM)
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == signal.SIGTERM

def with_threads():
    libc = ctypes.CDLL(None)
    come = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
    def threads_of_a_library():
        thread = ctypes.c_ulong()
        while True:
            libc.pthread_create(ctypes.byref(thread), None, come, None)
            libc.pthread_join(thread, None)
    for _ in range(3):
        threading.Thread(target=threads_of_a_library, daemon=True).start()
    last = dumps(signal.SIGUSR1)
    for _ in range(300):
        fddp.telemetry.flight.dump._stacks()
    last.stop()

class Late:
    kill, own = os.kill, os.getpid
    def __del__(self):
        self.kill(self.own(), signal.SIGUSR1)

def at_the_very_end():
    global late
    dumps(signal.SIGUSR1)
    late = Late()  # goes with the module, after Python has given signals their defaults back

def dumps(number):
    return fddp.dump_flights(directory, on_signal=number)

ways = {
    "SIGTERM": lambda: ended_by(signal.SIGTERM),
    "SIGHUP": lambda: ended_by(signal.SIGHUP),
    "SIGINT": lambda: ended_by(signal.SIGINT),
    "SIGQUIT": lambda: ended_by(signal.SIGQUIT),
    "SIGUSR1": lambda: ended_by(signal.SIGUSR1),
    "SIGCHLD": lambda: ended_by(signal.SIGCHLD),
    "nested": nested,
    "ignored": ignored,
    "interrupted": interrupted,
    "forked": forked,
    "threads": with_threads,
    "late": at_the_very_end,
}
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for name, way in ways.items():
    directory = Path(sys.argv[1]) / name
    pid = os.fork()
    if not pid:
        try:
            way()
        except KeyboardInterrupt:
            os._exit(2)
        if name == "late":
            sys.exit(7)
        os._exit(7)  # the interpreter's own end takes seconds
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(name, status, *sorted(path.suffix for path in directory.iterdir()), flush=True)
"""


def test_previous_signal_disposition_is_kept(tmp_path: Path) -> None:
    """The exit code is the signal's, negative; 7 is that of a process that goes on, and 2 that of a
    KeyboardInterrupt."""
    done = run_python("-c", ENDINGS, str(tmp_path))
    assert done.stdout.splitlines() == [
        "SIGTERM -15 .json .txt",
        "SIGHUP -1 .json .txt",
        "SIGINT 2 .json .txt",
        "SIGQUIT -3 .json .txt",
        "SIGUSR1 7 .json .pid .txt",
        "SIGCHLD 7 .json .txt",
        "nested -15 .json .json .txt .txt",
        "ignored 7 .json .txt",
        "interrupted -15 .json .txt",
        "forked 7",
        "threads 7",
        "late 7",
    ], done.stderr


def test_a_directory_that_can_not_be_written_to_is_refused_at_once() -> None:
    with pytest.raises(OSError, match="/proc"):
        fddp.dump_flights("/proc")
    with pytest.raises(OSError, match="/proc"):
        fddp.dump_flights("/proc", on_signal=signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    error = fddp.DesyncError("as it was")
    fddp.telemetry.flight.dump.dump_on_failure(error)
    assert str(error) == "as it was"


def test_files_do_not_follow_links(tmp_path: Path) -> None:
    """Names can be guessed: another user may put links there, to files of this one."""
    own = tmp_path / "own.txt"
    own.write_text("kept")
    with fddp.dump_flights(tmp_path / "flights") as dumps:
        first = dumps.write("first")
        stem, _, number = first.stem.rpartition("-")
        for suffix in (".txt", ".json"):
            for end in ("", ".part"):
                name = f"{stem}-{int(number) + 1}{suffix}{end}"
                (dumps.directory / name).symlink_to(own)
        second = dumps.write("second")
    assert own.read_text() == "kept"
    for path in (second, second.with_suffix(".json")):
        assert not path.is_symlink()
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid == 0:
        os.chown(tmp_path, 1, -1)
    with pytest.raises(PermissionError, match=r"belongs to user .*; pass a directory of your own"):
        fddp.dump_flights(tmp_path)


def test_a_flight_that_is_not_whole_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def full(half: Path, path: Path) -> None:
        if path.suffix == ".txt":
            raise OSError(28, "No space left on device")
        replace(half, path)

    with fddp.dump_flights(tmp_path) as dumps:
        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            dumps.write("on a full disk")
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"], "which was whole"


def test_numbers_of_processes_that_were_killed_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    host = socket.gethostname()
    others = [f"{host}-{os.getppid()}.pid", f"{host}-b-{ended.pid}.pid", f"other-{ended.pid}.pid"]
    for name in [*others, f"{host}-{ended.pid}.pid"]:
        (tmp_path / name).write_text("")
    with fddp.dump_flights(tmp_path, on_signal=signal.SIGUSR1):
        found = {path.name for path in tmp_path.iterdir()}
        assert found == {*others, f"{host}-{os.getpid()}.pid"}
    with fddp.dump_flights(tmp_path, on_signal=signal.SIGTERM):
        found = {path.name for path in tmp_path.iterdir()}
        assert found == set(others), "another signal than SIGTERM would end this process"


def test_stacks_of_all_threads_are_dumped(tmp_path: Path) -> None:
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with fddp.dump_flights(tmp_path) as dumps:
            text = dumps.write("as an example").read_text().split("stacks of threads")[1]
    finally:
        done.set()
        other.join()
    threads = text.split("hread 0x")
    assert "in test_stacks_of_all_threads_are_dumped" in threads[-1], "this one comes last"
    assert any("in wait" in one and "threading.py" in one for one in threads[:-1])
