"""Helpers of commands: argument types, errors, launching, and writing files."""

from __future__ import annotations

import argparse
import importlib.util
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from fddp.cli.launch import launch
from fddp.extend import MIB, plain_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

T = TypeVar("T")

Commands: TypeAlias = "argparse._SubParsersAction[Any]"

STDOUT = Path("-")

#: by module: the name of its package, and the extra of fddp that installs it
_EXTRAS = {
    "rich": ("rich", "demo"),
    "sklearn": ("scikit-learn", "demo"),
    "matplotlib": ("matplotlib", "viz"),
    "hypothesis": ("hypothesis", "testing"),
}


class Check(NamedTuple):
    """A value and its upper limit."""

    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """True if the value is within the limit; NaN is not."""
        return self.value <= self.limit

    def __str__(self) -> str:
        wanted = "must be 0" if self.limit == 0 else f"at most {self.limit:.0e}"
        return f"{'passed' if self.passed else 'FAILED'}: {wanted}"


class CallError(Exception):
    """A call that can't be served. Reported in one line, with exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(
            " ".join(message.split())
        )  # the message may quote an error of several lines


def require(*modules: str) -> None:
    """Check that optional libraries are installed.

    Raises:
        CallError: some are missing; the text has the command to install them.
    """
    missing = [_EXTRAS[name] for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        packages = " and ".join(package for package, _ in missing)
        extras = ",".join(dict.fromkeys(extra for _, extra in missing))
        raise CallError(f"needs {packages}: pip install fddp[{extras}]")


def launched(prog: str, ranks: int, fn: Callable[..., T], *args: Any) -> T:
    """Return the result of `fn` on rank 0, or exit with one line if a rank failed."""
    try:
        return launch(ranks, fn, *args)[0]
    except ChildFailedError:
        print(f"{prog}: a rank failed; its error is above", file=sys.stderr)
        sys.exit(1)
    except SignalException as error:
        print(f"{prog}: ended by {error.sigval.name}", file=sys.stderr)
        sys.exit(128 + error.sigval)


class Printer:
    """Prints tables, and writes and reports files.

    Args:
        json: file of a command's JSON; for `STDOUT`, other output goes to the standard error.
        width: columns of tables of rich if the output is no terminal.
    """

    def __init__(self, json: Path | None = None, width: int = 80) -> None:
        self._to_stderr = json == STDOUT
        self._width = width

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None if the output is none."""
        stream = sys.stderr if self._to_stderr else sys.stdout
        return shutil.get_terminal_size().columns if stream.isatty() else None

    def show(self, text: RenderableType) -> None:
        """Print a text, or a table of rich."""
        if isinstance(text, str):
            print(text, file=sys.stderr if self._to_stderr else sys.stdout)
            return
        from rich.console import Console

        console = Console(highlight=False, stderr=self._to_stderr)
        if not console.is_terminal:
            console.width = self._width
        console.print(text, markup=False)

    def write_text(self, path: Path | None, text: str) -> None:
        """Write a text if `path` is given."""
        if path == STDOUT:
            print(text)
        elif path is not None:
            self._write(path, lambda: path.write_text(text, encoding="utf-8"))

    def write_png(self, path: Path, figure: Figure) -> None:
        """Write a figure."""
        self._write(path, lambda: figure.savefig(path, format="png", dpi=150))

    def _write(self, path: Path, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            raise CallError(f"can't write {str(path)!r}: {error.strerror}") from error
        self.show(f"written to {path}")


def titled_table(
    title: str,
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[str] = ("plan",),
) -> str:
    """Return a table with a title and a caption, in which only columns in `left` are left-aligned.
    Cells are never broken."""
    numeric = [number for number, name in enumerate(columns) if name not in left]
    return f"{title}\n\n{plain_table(columns, rows, numeric)}\n\n{caption}"


# Arguments


def add_value(
    parser: argparse.ArgumentParser,
    option: str,
    parse: Callable[[str], object],
    default: object,
    text: str,
) -> None:
    """Declare an option with a value and a default, which is appended to its help."""
    metavar = "MIB" if parse is cap else "N"
    text = f"{text} (default: %(default)s)"
    parser.add_argument(option, type=parse, default=default, metavar=metavar, help=text)


def add_ranks(parser: argparse.ArgumentParser, most: int) -> None:
    """Declare `--ranks` of a command that starts processes."""
    add_value(parser, "--ranks", whole(1, most), 2, "processes, one thread each")


def add_outputs(parser: argparse.ArgumentParser, json: str, png: str) -> None:
    """Declare `--json` and `--png` with the help of what they write and draw."""
    json_help = f"write {json} to a file; - for stdout"
    parser.add_argument("--json", type=output_or_stdout, metavar="FILE", help=json_help)
    parser.add_argument("--png", type=output, metavar="FILE", help=f"draw {png} to a file")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argument type for whole numbers within bounds."""
    wanted = f"a whole number of at least {least}" + (f" and at most {most}" if most else "")

    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
        if value is None or value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return value

    return parse


def positive(text: str) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def cap(text: str) -> float:
    """Parse a bucket cap in MiB."""
    value = positive(text)
    if not 1 <= value * MIB < 2**63:
        raise argparse.ArgumentTypeError(
            f"must be a cap of at least one byte and below 2**63, in MiB, got {text!r}"
        )
    return value


def output(text: str) -> Path:
    """Parse the path of a file in an existing directory."""
    path = Path(text)
    try:
        fits = not path.is_dir() and path.parent.is_dir()
    except OSError:  # a name that is too long
        fits = False
    if not fits:
        raise argparse.ArgumentTypeError(f"must be a file in a directory that exists, got {text!r}")
    return path


def output_or_stdout(text: str) -> Path:
    """Parse as `output`, with `STDOUT` for "-"."""
    return STDOUT if text == "-" else output(text)
