"""Lines of the user's code that lead to a call."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

import fddp
from fddp.telemetry.call_site import call_site, own_lines

PACKAGE = str(Path(fddp.__file__).parent)


def called_through(files: list[str], call: Callable[[], str]) -> str:
    """The result of a call from the last of these files, each of which is called by the one before
    it, from its second line."""
    for file in reversed(files):
        scope = {"call": call}
        exec(compile("def run():\n    return call()\n", file, "exec"), scope)
        call = scope["run"]
    return call()


def lines_through(*files: str) -> str:
    return called_through([*files], lambda: own_lines(sys._getframe(1)))


def test_three_lines_at_most_lead_to_a_call() -> None:
    found = lines_through("/own/a.py", "/own/b.py", "/own/c.py", "/own/d.py")
    assert found == ("/own/d.py:2 in run, from /own/c.py:2 in run, from /own/b.py:2 in run")


def test_lines_of_libraries_are_left_out() -> None:
    others = (fddp.__file__, torch.__file__, threading.__file__, "<frozen importlib>")
    for other in others:
        found = lines_through("/own/a.py", other, "/own/b.py", other)
        assert found.startswith(f"/own/b.py:2 in run, from /own/a.py:2 in run, from {__file__}:")


def test_of_installed_packages_an_innermost_line_is_shown() -> None:
    package = "/env/site-packages/framework/loop.py"
    found = lines_through("/own/a.py", package, "/own/b.py")
    assert found.startswith(f"/own/b.py:2 in run, from /own/a.py:2 in run, from {__file__}:")
    found = lines_through("/own/a.py", package, package)
    assert found.startswith(f"{package}:2 in run, from /own/a.py:2 in run, from {__file__}:")


def test_the_demo_counts_as_a_caller() -> None:
    demo = f"{PACKAGE}/cli/demo/train.py"
    assert lines_through("/own/a.py", demo).startswith(f"{demo}:2 in run, from /own/a.py:2 in run")
    assert called_through([demo], lambda: str(call_site(__file__))) == f"{demo}:2"


def test_a_call_is_of_the_innermost_line_outside_of_libraries() -> None:
    inside = (__file__, "/env/jax/")
    files = ["/own/a.py", "/own/b.py", f"{PACKAGE}/sync/engine.py", "/env/jax/api.py"]
    assert called_through(files, lambda: str(call_site(*inside))) == "/own/b.py:2"
    assert called_through(files, lambda: str(call_site(__file__))) == "/env/jax/api.py:2"
