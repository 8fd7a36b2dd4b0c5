"""Python interpreters of this machine, and virtual environments of them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

VERSIONS = ("3.10", "3.11", "3.12", "3.13")  # as in the classifiers of the package


def find(version: str) -> str | None:
    """Path of a Python of this minor version: on PATH, of pyenv, or of uv. None if missing."""
    for candidate in _candidates(version):
        code = "import sys, venv; print('{}.{}'.format(*sys.version_info))"
        try:
            done = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    return None


def _candidates(version: str) -> Iterator[str]:
    on_path = shutil.which(f"python{version}")
    if on_path:
        yield on_path
    root = _printed(["pyenv", "root"])
    if root:
        yield from map(
            str, sorted(Path(root).glob(f"versions/{version}.*/bin/python"), reverse=True)
        )
    found = _printed(["uv", "python", "find", "--no-python-downloads", version])
    if found:
        yield found


def _printed(command: list[str]) -> str:
    """Output of a command. Empty if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def environment(python: str, folder: Path) -> str:
    """Create a virtual environment in `folder`, unless it is there. Returns its Python."""
    inside = folder / "bin" / "python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return str(inside)
