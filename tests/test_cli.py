"""What the command line says to mistakes: one line, and exit code 2."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fddp import cli


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a call is refused with."""
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith("\n")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["demo", "--ranks", "0"], "--ranks: must be a whole number of at least 1"),
        (["demo", "--ranks", "17"], "at most 16, got '17'"),
        (["demo", "--ranks", "two"], "got 'two'"),
        (["demo", "--ranks", "1\n2"], r"got '1\n2'"),
        (["demo", "--ranks", "\u0662"], "--ranks: must be a whole number"),
        (["demo", "--ranks"], "--ranks: expected one argument"),
        (["demo", "--epochs", "-1"], "--epochs"),
        (["demo", "--epochs", "1.5"], "got '1.5'"),
        (["demo", "--epochs", "9" * 5000], "--epochs: must be a whole number"),
        (["demo", "--bucket-cap-mb", "0"], "--bucket-cap-mb: must be a number above 0, got '0'"),
        (["demo", "--bucket-cap-mb", "nan"], "got 'nan'"),
        (["demo", "--bucket-cap-mb", "inf"], "got 'inf'"),
        (["demo", "--bucket-cap-mb", "big"], "got 'big'"),
        (["demo", "--speed", "1"], "unrecognized arguments: --speed 1"),
        (["bench", "--models", "resnet"], "invalid choice: 'resnet'"),
        (["bench", "--rounds", "0"], "--rounds: must be a whole number of at least 1, got '0'"),
        (["bench", "--json", "no/such/place.json"], "must be a file in a directory that exists"),
        (["bench", "--json", "."], "must be a file in a directory that exists, got '.'"),
    ],
)
def test_a_mistake_gets_one_line(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(argv, capsys)
    assert text in line
    assert line.startswith("python -m fddp")
    assert "--help)" in line


@pytest.mark.parametrize("command", ["demo", "bench"])
@pytest.mark.parametrize(("module", "package"), [("rich", "rich"), ("sklearn", "scikit-learn")])
def test_a_missing_library_is_named(
    command: str,
    module: str,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    line = refused([command], capsys)
    assert line == f"python -m fddp {command}: error: needs {package}: pip install fddp[demo]\n"


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"], ["bench", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 0
    assert "usage: python -m fddp" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["fddp", "fddp.bench"])
def test_it_runs_as_a_module(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--no-such-option"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("python -m fddp")
    assert done.stderr.count("\n") == 1
