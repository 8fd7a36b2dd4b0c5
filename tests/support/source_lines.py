"""Line numbers, for errors that name a place in a test."""

from __future__ import annotations

from pathlib import Path


def line_of(file: str, text: str) -> int:
    """Return the number of the first line of `file` with this text."""
    lines = Path(file).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)
