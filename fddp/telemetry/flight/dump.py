"""Flights written down: when a step fails, or when the process is sent a signal."""

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

from fddp.errors import DesyncError, FddpError, RankLostError, SyncTimeoutError, error_text
from fddp.telemetry.flight.recorder import flight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

_BREAKS = (DesyncError, RankLostError, SyncTimeoutError)  # after which ranks are not together
_ASKING = (signal.SIGUSR1, signal.SIGUSR2)  # there to be asked with; what gets one goes on
_HARMLESS = (  # by default
    *_ASKING,
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
_installed: list[FlightDumps] = []  # the newest last, which counts


class FlightDumps:
    """Where this process writes flights, from `dump_flights` until `stop`.

    Attributes:
        directory: holds the files.
    """

    def __init__(self, directory: Path, on_signal: signal.Signals | None) -> None:
        self.directory = directory
        self._signal = on_signal
        self._earlier: Any = None  # what the signal did before
        self._writes = False  # at this moment, on the signal
        self._pid = os.getpid()
        self._pid_file: Path | None = None

    def write(self, reason: str) -> Path:
        """Writes a flight of all that is alive, as a table with the stacks of all threads, and as
        JSON for `python -m fddp flight`.

        Args:
            reason: why, in words.

        Returns:
            Path of the table; the JSON has the same name with another ending.

        Raises:
            OSError: it can't be written.
        """
        taken = flight(reason=reason)
        rank = f"rank{dist.get_rank()}-" if dist.is_available() and dist.is_initialized() else ""
        name = f"flight-{rank}{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
        path = self.directory / f"{name}.txt"
        _write(self.directory / f"{name}.json", taken.to_json())
        _write(path, f"{taken}\n\nstacks of threads, innermost call first\n\n{_stacks()}")
        return path

    def stop(self) -> None:
        """Takes it away, also where it is not the newest; a second call does nothing.

        Raises:
            ValueError: there is a signal to give back, and this is not the main thread.
        """
        if self not in _installed:
            return
        atexit.unregister(self._at_exit)
        self._forget_pid()  # first, while the signal still does no harm
        if self._signal is not None:
            if signal.getsignal(self._signal) == self._handle:
                # None stands for a handler that Python did not install and can't put back.
                signal.signal(self._signal, self._earlier or signal.SIG_DFL)
            for later in _installed:
                if later._earlier == self._handle:
                    later._earlier = self._earlier
        _installed.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _install(self) -> None:
        _probe(self.directory)
        if self._signal is not None:
            self._earlier = signal.signal(self._signal, self._handle)
        _installed.append(self)
        if self._signal in _ASKING:  # which does no harm from now on
            _forget_ended(self.directory)
            path = self.directory / f"{socket.gethostname()}-{self._pid}.pid"
            try:
                _write(path, f"{self._pid}\n")
            except BaseException:
                self.stop()
                raise
            self._pid_file = path
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        self._forget_pid()
        assert self._signal is not None
        # Python, as it ends, gives signals with a handler their default back, which would give the
        # process another exit code; one that is ignored stays so.
        with contextlib.suppress(ValueError):  # not the main thread
            if signal.getsignal(self._signal) == self._handle:
                signal.signal(self._signal, signal.SIG_IGN)

    def _forget_pid(self) -> None:
        """Nobody is to send this number the signal any more."""
        path, self._pid_file = self._pid_file, None
        if path is None or self._pid != os.getpid():  # a fork's is its parent's
            return
        if all(other._pid_file != path for other in _installed):
            with contextlib.suppress(OSError):
                path.unlink()

    def _handle(self, number: int, frame: Any) -> None:
        if self._writes:
            return  # a signal that comes meanwhile is answered by the flight that is being written
        self._writes = True
        try:
            # Else a handler of somebody else's has kept this one, or a fork has its parent's, whose
            # flight must not take the place of the parent's own.
            if self in _installed and self._pid == os.getpid():
                self.write(signal.Signals(number).name)
        except Exception:  # the step that was interrupted is not to fail of it
            _complain(f"fddp: no flight was written\n{traceback.format_exc()}")
        finally:
            self._writes = False
        if callable(self._earlier):
            self._earlier(number, frame)
        elif self._earlier == signal.SIG_DFL and number not in _HARMLESS:
            _end(number)


def dump_flights(
    directory: str | os.PathLike[str], *, on_signal: signal.Signals | None = None
) -> FlightDumps:
    """From now on writes flights into a directory: when a step fails so that ranks are no longer
    together, and on a signal. The error's text says where.

    Args:
        directory: is made if it is not there.
        on_signal: `signal.SIGUSR1`, for instance. What handled it before is called afterwards, and
            a default that ends the process does end it, as that of `signal.SIGTERM`; after SIGUSR1
            and SIGUSR2 the process goes on. The handler runs in the main thread when that is in
            Python: at once in a loop, within 0.25 s in a wait for other ranks over gloo or shared
            memory, not within a long call of another library, and not in a wait for NCCL. For
            SIGUSR1 and SIGUSR2, a file HOST-PID.pid in the directory has the number of the process,
            until it stops or ends: sent to a process without a handler, a launcher for instance,
            the signal ends it. A fork of this process writes nothing on the signal, unless it calls
            this function itself.

    Returns:
        A handle that stops it; also a context manager. The newest one counts.

    Raises:
        OSError: the directory can't be made, or not be written to.
        TypeError: `on_signal` is no signal.
        ValueError: `on_signal` outside of the main thread.

    Example:
        >>> import fddp, tempfile
        >>> with tempfile.TemporaryDirectory() as directory, fddp.dump_flights(directory) as dumps:
        ...     dumps.write("as an example").read_text().splitlines()[0]
        'process ... on ...: as an example'
    """
    if on_signal is not None and not isinstance(on_signal, signal.Signals):
        raise TypeError(f"on_signal takes signal.SIGUSR1, for instance, got {on_signal!r:.80}")
    path = Path(directory).absolute()
    path.mkdir(parents=True, exist_ok=True)
    dumps = FlightDumps(path, on_signal)
    dumps._install()
    return dumps


def dump_on_failure(error: BaseException, *, breaks: bool = False) -> None:
    """Writes a flight if an error leaves ranks apart and somebody wants one; the error says where.

    Args:
        error: what is about to be raised.
        breaks: whether ranks are apart, whatever kind of error it is.
    """
    dumps = _installed[-1] if _installed else None
    if dumps is None or not (breaks or isinstance(error, _BREAKS)):
        return
    try:
        said = f"what this process did before is in {str(dumps.write(error_text(error)))!r}"
    except Exception as problem:  # which must not take the place of the error
        said = f"what this process did before can't be written: {error_text(problem)}"
    if isinstance(error, FddpError):
        error.args = (f"{error}; {said}", *error.args[1:])


@contextlib.contextmanager
def dump_failures() -> Iterator[None]:
    """Calls `dump_on_failure` for what is raised inside."""
    try:
        yield
    except BaseException as error:
        dump_on_failure(error)
        raise


def _complain(text: str) -> None:
    """Past Python's buffers, which can't be entered again where a signal has interrupted them."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def _end(number: int) -> None:
    """Ends the process by a signal, as the default does; its parent is to see that it was one."""
    for dumps in _installed:
        dumps._forget_pid()
    for half in list(_partial_files):  # of a flight that this signal has interrupted
        with contextlib.suppress(OSError):
            half.unlink()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _probe(directory: Path) -> None:
    """Raises an OSError if nothing can be written there: a step that fails is late to learn it."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix="probe-") as file:
        file.write(b"probe")
        file.flush()


def _forget_ended(directory: Path) -> None:
    """Removes what processes of this host left that were killed: their numbers are used again."""
    with contextlib.suppress(OSError):
        for path in directory.glob("*.pid"):
            host, _, number = path.stem.rpartition("-")
            if host == socket.gethostname() and number.isdecimal() and not _runs(int(number)):
                path.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return True


def _stacks() -> str:
    """Not by faulthandler, which takes no lock: it ends the process where a thread of a library
    comes to Python at that moment."""
    collects = gc.isenabled()
    gc.disable()  # what it frees may want the lock under which frames are collected
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
    """In one piece, so that readers never see half of it; a full disk keeps none of it."""
    half = path.with_suffix(f"{path.suffix}.part")
    _partial_files.add(half)
    try:
        with half.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        half.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            half.unlink()
        raise
    finally:
        _partial_files.discard(half)
