"""Public names of the package: listed, described, loaded when needed, and the command's name."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest

import fddp
from fddp import errors, extend
from fddp.cli import main as cli
from tests.support.rooms import PACKAGE

PYPROJECT = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
SUBMODULES = {
    *("averaging", "errors", "extend", "hooks", "integrations", "jax", "numerics", "periodic"),
    *("testing", "viz", "watch"),
}


def test_every_public_name_is_there_and_described() -> None:
    described = re.findall(r"\w+", fddp.__doc__ or "")
    for name in fddp.__all__:
        assert hasattr(fddp, name), name
        assert name in described, f"{name} is not in the docstring of fddp"


def test_errors_are_names_of_the_package_too() -> None:
    for name in errors.__all__:
        assert getattr(fddp, name) is getattr(errors, name)
        assert name not in fddp.__all__
    assert (fddp.Op, fddp.LeafSpec) == (extend.Op, extend.LeafSpec)


def test_dir_has_public_names_only() -> None:
    assert set(dir(fddp)) == {*fddp.__all__, *SUBMODULES, "__version__"}
    missing = {"jax"} if find_spec("jax") is None else set()
    names = {*dir(fddp)} - missing
    modules = {name for name in names if isinstance(getattr(fddp, name), ModuleType)}
    assert modules <= SUBMODULES


def test_submodules_with_extras_are_loaded_on_first_use() -> None:
    program = """
import sys, fddp
assert not {"jax", "hypothesis", "matplotlib", "rich"} & {*sys.modules}
assert not {"fddp.viz", "fddp.watch"} & {*sys.modules}
print(fddp.viz.plot_plan.__name__, fddp.viz is sys.modules["fddp.viz"])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "plot_plan True\n", run.stderr


def test_unknown_name_has_a_suggestion() -> None:
    with pytest.raises(AttributeError, match="module 'fddp' has no attribute 'GradSnyc'") as caught:
        getattr(fddp, "GradSnyc")  # noqa: B009 - unknown to type checkers
    assert (caught.value.name, caught.value.obj) == ("GradSnyc", fddp)


def test_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert f'\nversion = "{fddp.__version__}"\n' in PYPROJECT
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"fddp {fddp.__version__}, torch ")


def test_console_script_is_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    (target,) = re.findall(r'\[project\.scripts\]\nfddp = "(.*)"\n', PYPROJECT)
    module, _, name = target.partition(":")
    with pytest.raises(SystemExit):
        getattr(import_module(module), name)(["plan"])
    assert capsys.readouterr().err.startswith("fddp plan: error: ")
