"""Usage errors of the command line: one line, and exit code 2."""

from __future__ import annotations

import sys

import pytest

from tests.support import commands as cli
from tests.support.commands import refused
from tests.support.programs import run_python

SIMULATE = ("simulate", "m:f", "--topology", "world=2", "--cost", "1e-5,1e-9")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["simulat"], "; did you mean 'simulate'? (see "),
        (["plan", "m:f", "--buket-cap-mb", "1"], "; did you mean '--bucket-cap-mb'? (see "),
        (["simulate", "m:f", "--algoritm=hierarchical"], "required: --topology, --cost"),
        (
            [*SIMULATE, "--backward-ms", "1", "--algorithm", "hierachical"],
            "; did you mean 'hierarchical'? (see ",
        ),
        (["demo", "--ranks", "0"], "--ranks: must be a whole number of at least 1"),
        (["demo", "--ranks", "17"], "at most 16, got '17'"),
        (["demo", "--ranks", "1\n2"], r"got '1\n2'"),
        (["demo", "--ranks"], "--ranks: expected one argument"),
        (["demo", "--epochs", "1.5"], "got '1.5'"),
        (["demo", "--bucket-cap-mb", "0"], "--bucket-cap-mb: must be a number above 0, got '0'"),
        (["demo", "--bucket-cap-mb", "big"], "got 'big'"),
        (["demo", "--speed", "1"], "unrecognized arguments: --speed 1"),
        (["bench", "--models", "resnet"], "invalid choice: 'resnet'"),
        (["bench", "--json", "no/such/place.json"], "must be a file in a directory that exists"),
        (["plan"], "the following arguments are required: SOURCE"),
        (["plan", "m:f", "--png", "no/such/place.png"], "must be a file in a directory that"),
        (["plan", "m:f", "--json", "."], "must be a file in a directory that exists, got '.'"),
        (["simulate", "m:f"], "the following arguments are required: --topology, --cost"),
        ([*SIMULATE], "one of the arguments --backward-ms --ready is required"),
        ([*SIMULATE, "--backward-ms", "1", "--ready", "f"], "not allowed with argument"),
        ([*SIMULATE, "--backward-ms", "inf"], "-ms: must be a number above 0, got 'inf'"),
        ([*SIMULATE, "--backward-ms", "1", "--caps", "1,,2"], "--caps: must be a number above 0"),
        ([*SIMULATE, "--backward-ms", "1", "--caps", "1e-9"], "must be a cap of at least one byte"),
        ([*SIMULATE, "--backward-ms", "1", "--jitter", "a"], "must be SPREAD or SPREAD,RATE,"),
        ([*SIMULATE, "--backward-ms", "1", "--jitter", "0.1,0.2"], "expected one number or three"),
        ([*SIMULATE, "--backward-ms", "1", "--jitter", "0.1,2,2"], "straggler_rate must be in"),
        (["simulate", "m:f", "--topology", "8"], "sizes of named axes, outermost first"),
        (["simulate", "m:f", "--topology", "a=2,a=3"], "sizes of named axes, outermost first"),
        (["simulate", "m:f", "--topology", "a=0"], "needs an int of at least 1 as size, got 0"),
        (["simulate", "m:f", "--topology", "a=9999999999"], "ranks; the limit is"),
        (["simulate", "m:f", "--cost", "carrier-pigeon"], "must be one of internet-100m, "),
        (["simulate", "m:f", "--cost", "1e-5"], "or ALPHA,BETA, or FILE.json"),
        (["simulate", "m:f", "--cost", "nan,1"], "alpha_s must be a number from 0 to 1e+09"),
        (["simulate", "m:f", "--cost", "world=no.json"], "'no.json': "),
    ],
)
def test_a_mistake_gets_one_line(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(argv, capsys)
    assert text in line
    assert line.startswith("python -m benchmarks" if argv[:1] == ["bench"] else "python -m fddp")
    assert "--help)" in line


@pytest.mark.parametrize(
    ("argv", "modules", "install"),
    [
        (["demo"], ["rich"], "rich: pip install fddp[demo]"),
        (["demo"], ["rich", "sklearn"], "rich and scikit-learn: pip install fddp[demo]"),
        (["bench"], ["sklearn"], "scikit-learn: pip install fddp[demo]"),
        (["plan", "m:f", "--png", "p.png"], ["matplotlib"], "matplotlib: pip install fddp[viz]"),
    ],
)
def test_missing_libraries_are_named_at_once(
    argv: list[str],
    modules: list[str],
    install: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    line = refused(argv, capsys)
    prog = "python -m benchmarks" if argv == ["bench"] else f"python -m fddp {argv[0]}"
    assert line == f"{prog}: error: needs {install}\n"


@pytest.mark.parametrize("command", [None, "demo", "plan", "simulate", "bench"])
def test_help(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--help"] if command is None else [command, "--help"]
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 0
    prog = "benchmarks" if command == "bench" else "fddp"
    assert f"usage: python -m {prog}" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["fddp", pytest.param("benchmarks", marks=pytest.mark.nightly)])
def test_command_runs_as_a_module(module: str) -> None:
    done = run_python("-m", module, "--no-such-option", code=2)
    assert done.stdout == ""
    assert done.stderr.startswith(f"python -m {module}")
    assert done.stderr.count("\n") == 1
