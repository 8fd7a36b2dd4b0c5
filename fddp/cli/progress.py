"""Progress of commands: bars on a terminal, lines elsewhere. Requires rich."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

if TYPE_CHECKING:
    from typing_extensions import Self


class Stages:
    """Context manager that shows the consecutive stages of a run.

    Args:
        shown: False for no output; one of several ranks shows progress.

    Example:
        >>> with Stages(shown=True) as stages:
        ...     stages.begin("counting", 2)
        ...     stages.advance()
        ...     stages.advance()
        ...     stages.note("counted to 2")
        counting
        counting: counted to 2
    """

    def __init__(self, *, shown: bool) -> None:
        self._console = Console(highlight=False)
        self._shown = shown
        self._bars = Progress(
            TextColumn("{task.description}", justify="left"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not (shown and self._console.is_terminal),
        )
        self._name = ""
        self._task = TaskID(-1)

    def begin(self, name: str, total: int) -> None:
        """Start a stage of `total` steps."""
        self._name = name
        self._task = self._bars.add_task(name, total=total, note="")
        self._line(name)

    def advance(self) -> None:
        """Count one step of the stage."""
        self._bars.advance(self._task)

    def note(self, text: str) -> None:
        """Show the status of the stage; without a terminal, print a line."""
        self._bars.update(self._task, note=text)
        self._line(f"{self._name}: {text}")

    def _line(self, text: str) -> None:
        if self._shown and self._bars.disable:
            self._console.print(text, soft_wrap=True, markup=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
