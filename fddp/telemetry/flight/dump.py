"""Files of flights, written when a step fails or when the process receives a signal."""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fddp.core.entrance import entrance
from fddp.errors import DesyncError, FddpError, RankLostError, SyncTimeoutError, error_text
from fddp.telemetry.flight.recorder import flight

if TYPE_CHECKING:
    from collections.abc import Iterator

_BREAKS = (DesyncError, RankLostError, SyncTimeoutError)  # after these, ranks are out of step
_REQUEST_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # after which the process continues
_HARMLESS = (  # signals that do not end the process by default or by request
    *_REQUEST_SIGNALS,
    signal.SIGCHLD,
    signal.SIGCONT,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGURG,
    signal.SIGWINCH,
)
_numbers = itertools.count(1)
_partial_files: set[Path] = set()  # files that are being written
_installed: list[FlightDumps] = []  # the last one is in effect


class FlightDumps(contextlib.AbstractContextManager["FlightDumps"]):
    """Writer of flights, in effect from `dump_flights` until `stop`.

    Attributes:
        directory: directory of the files.
    """

    def __init__(self, directory: Path, on_signal: signal.Signals | None) -> None:
        self.directory = directory
        self._signal = on_signal
        self._previous: Any = None  # handler of the signal before this one
        self._is_writing = False  # in the signal handler
        self._pid = os.getpid()
        self._pid_file: Path | None = None

    def write(self, reason: str) -> Path:
        """Write a flight of everything alive, as a table with the stacks of all threads, and as
        JSON for `python -m fddp flight`.

        Args:
            reason: the reason in words.

        Returns:
            Path of the table. The JSON file has the same name with another suffix.

        Raises:
            OSError: the files cannot be written.
        """
        taken = flight(reason=reason)
        rank = f"rank{dist.get_rank()}-" if dist.is_available() and dist.is_initialized() else ""
        name = f"flight-{rank}{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
        path = self.directory / f"{name}.txt"
        _write(self.directory / f"{name}.json", taken.to_json())
        _write(path, f"{taken}\n\nstacks of threads, innermost call first\n\n{_stacks()}")
        return path

    def stop(self) -> None:
        """Uninstall this writer, even if it is not the newest. A second call does nothing.

        Raises:
            ValueError: a signal handler must be restored, and this is not the main thread.
        """
        if self not in _installed:
            return
        atexit.unregister(self._at_exit)
        self._remove_pid_file()  # first, while the signal is still handled
        if self._signal is not None:
            if signal.getsignal(self._signal) == self._handle:
                # None stands for a handler not installed from Python, which cannot be restored.
                signal.signal(self._signal, self._previous or signal.SIG_DFL)
            for later in _installed:
                if later._previous == self._handle:
                    later._previous = self._previous
        _installed.remove(self)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _install(self) -> None:
        # Raises an OSError now, rather than at the first failure, if nothing can be written.
        with tempfile.NamedTemporaryFile(dir=self.directory, prefix="probe-") as file:
            file.write(b"probe")
            file.flush()
        if self._signal is not None:
            self._previous = signal.signal(self._signal, self._handle)
        _installed.append(self)
        if self._signal in _REQUEST_SIGNALS:  # from now on harmless to this process
            _remove_stale_pid_files(self.directory)
            path = self.directory / f"{socket.gethostname()}-{self._pid}.pid"
            try:
                _write(path, f"{self._pid}\n")
            except BaseException:
                self.stop()
                raise
            self._pid_file = path
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        self._remove_pid_file()
        assert self._signal is not None
        # On exit Python restores the default of handled signals, and a late signal would change the
        # exit code. An ignored signal stays ignored.
        with contextlib.suppress(ValueError):  # not the main thread
            if signal.getsignal(self._signal) == self._handle:
                signal.signal(self._signal, signal.SIG_IGN)

    def _remove_pid_file(self) -> None:
        path, self._pid_file = self._pid_file, None
        if path is None or self._pid != os.getpid():  # after a fork the file is the parent's
            return
        if all(other._pid_file != path for other in _installed):
            with contextlib.suppress(OSError):
                path.unlink()

    def _handle(self, number: int, frame: Any) -> None:
        if self._is_writing:
            return  # the flight being written answers this signal too
        self._is_writing = True
        try:
            # Otherwise another handler still calls this uninstalled one, or this is a fork, whose
            # flight must not replace the parent's.
            if self in _installed and self._pid == os.getpid():
                self.write(signal.Signals(number).name)
        except Exception:  # must not fail the interrupted step
            _print_error(f"fddp: no flight was written\n{traceback.format_exc()}")
        finally:
            self._is_writing = False
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous == signal.SIG_DFL and number not in _HARMLESS:
            _terminate(number)


@entrance
def dump_flights(
    directory: str | os.PathLike[str], *, on_signal: signal.Signals | None = None
) -> FlightDumps:
    """Write flights to a directory from now on: when a failure leaves ranks out of step, and on a
    signal. The text of the error names the file.

    Args:
        directory: created if it does not exist.
        on_signal: a signal such as `signal.SIGUSR1`. The previous handler runs afterwards. If it is
            a default that ends the process, as for `signal.SIGTERM`, the process ends; after
            SIGUSR1 and SIGUSR2 it continues. The handler runs once the main thread executes Python:
            at once in a loop, within 0.25 s in a wait for other ranks over gloo or shared memory,
            after a long call of another library, and not in a wait for NCCL. For SIGUSR1 and
            SIGUSR2, the directory holds a file HOST-PID.pid with the process ID until the process
            stops or ends. Sent to a process without a handler, such as a launcher, the signal ends
            it. A fork of this process writes nothing on the signal, unless it calls this function
            itself.

    Returns:
        A handle that stops it, also usable as a context manager. The newest one is in effect.

    Raises:
        OSError: the directory cannot be created or written to, or belongs to another user.
        TypeError: `on_signal` is not a signal.
        ValueError: `on_signal` is used outside of the main thread.

    Example:
        >>> import fddp, tempfile
        >>> with tempfile.TemporaryDirectory() as directory, fddp.dump_flights(directory) as dumps:
        ...     dumps.write("as an example").read_text().splitlines()[0]
        'process ... on ...: as an example'
    """
    if on_signal is not None and not isinstance(on_signal, signal.Signals):
        raise TypeError(
            f"on_signal must be a signal, such as signal.SIGUSR1, got {on_signal!r:.80}"
        )
    path = Path(directory).absolute()
    path.mkdir(parents=True, exist_ok=True)
    owner = path.stat().st_uid
    if owner not in (0, os.geteuid()):
        raise PermissionError(
            f"{directory} belongs to user {owner}, who could replace its files; pass a directory "
            f"of your own"
        )
    dumps = FlightDumps(path, on_signal)
    dumps._install()
    return dumps


def dump_on_failure(error: BaseException, *, breaks: bool = False) -> None:
    """Write a flight if an error leaves ranks out of step and `dump_flights` is in effect. The path
    is added to the text of the error.

    Args:
        error: the error about to be raised.
        breaks: True if ranks are out of step whatever the type of the error.
    """
    dumps = _installed[-1] if _installed else None
    if dumps is None or not (breaks or isinstance(error, _BREAKS)):
        return
    try:
        note = f"the flight of this process is in {str(dumps.write(error_text(error)))!r}"
    except Exception as problem:  # must not replace the error
        note = f"the flight of this process cannot be written: {error_text(problem)}"
    if isinstance(error, FddpError):
        error.args = (f"{error}; {note}", *error.args[1:])


@contextlib.contextmanager
def dump_failures() -> Iterator[None]:
    """Call `dump_on_failure` for errors raised inside."""
    try:
        yield
    except BaseException as error:
        dump_on_failure(error)
        raise


def _print_error(text: str) -> None:
    """Write to stderr without Python's buffers, which a signal handler must not re-enter."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def _terminate(number: int) -> None:
    """End the process by the signal itself, so that the parent sees the signal as the cause."""
    for dumps in _installed:
        dumps._remove_pid_file()
    for half in list(_partial_files):  # of a flight that this signal interrupted
        with contextlib.suppress(OSError):
            half.unlink()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _remove_stale_pid_files(directory: Path) -> None:
    """Remove files of processes of this host that were killed, since PIDs are reused."""
    with contextlib.suppress(OSError):
        for path in directory.glob("*.pid"):
            host, _, number = path.stem.rpartition("-")
            if host == socket.gethostname() and number.isdecimal() and not _is_alive(int(number)):
                path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # a process of another user
        pass
    return True


def _stacks() -> str:
    """Format the stacks of all threads. faulthandler does the same without a lock, and crashes if a
    thread of a library enters Python at that moment."""
    collects = gc.isenabled()
    gc.disable()  # finalizers may want the lock under which frames are collected
    try:
        frames = sys._current_frames()
    finally:
        if collects:
            gc.enable()
    own = threading.get_ident()
    stacks = []
    for thread, frame in sorted(frames.items(), key=lambda item: item[0] == own):
        name = "Current thread" if thread == own else "Thread"
        calls = [
            f'  File "{call.f_code.co_filename}", line {line} in {call.f_code.co_name}'
            for call, line in traceback.walk_stack(frame)
        ]
        stacks.append("\n".join([f"{name} 0x{thread:016x}", *calls]))
    return "\n\n".join(stacks) + "\n"


def _write(path: Path, text: str) -> None:
    """Write a file atomically, so that readers never see a part of it, even if the disk is full."""
    half = path.with_suffix(f"{path.suffix}.part")
    _partial_files.add(half)
    try:
        with contextlib.suppress(OSError):
            half.unlink()  # of a killed process with the same number
        # Never through a link that someone else has put there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(
            os.open(half, flags, 0o600), "w", encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(text)
        half.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            half.unlink()
        raise
    finally:
        _partial_files.discard(half)
