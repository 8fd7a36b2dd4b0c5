"""Flights are read back, and lined up over ranks."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fddp.cli.main import main
from fddp.telemetry.flight.divergence import find_divergences
from fddp.telemetry.flight.log import Flight, FlightLog, FlightOp


def log_of(rank: int, *ops: FlightOp, name: str = "GradSync #1", size: int = 3) -> FlightLog:
    return FlightLog(name, tuple(range(size)), rank, "shm", 60.0, 5, "in backward", ops)


def flight_of(*logs: FlightLog, pid: int = 0, taken_s: float = 1.8e9) -> Flight:
    return Flight("host", pid, taken_s, "as an example", logs)


def op_of(number: int, *, state: Any = "done", bucket: int = 0, **fields: Any) -> FlightOp:
    op = FlightOp(number, 5, "all_reduce", bucket, f"w{bucket}", 8, 0.5, 0.1, 0.2, state)
    return op._replace(**fields)


IN_5 = "all_reduce of bucket 0 (w0) of step 5"
WAITS = (op_of(6), op_of(7, state="failed"))
#: a later operation is waited for first where the control word rides in it
NOT_WAITED_FOR = op_of(6, state="failed", waited_s=None)


@pytest.mark.parametrize(
    ("ops_by_rank", "number", "ranks", "text"),
    [
        ([(op_of(6), op_of(7))] * 3, -1, (), "all ranks agree up to operation 7"),
        (
            [(op_of(6), op_of(7)), (op_of(6), op_of(7)), (op_of(6), op_of(7, nbytes=16))],
            7,
            (2,),
            f"operation 7 is {IN_5}, 8 bytes, on ranks 0, 1; {IN_5}, 16 bytes, on rank 2",
        ),
        (
            [WAITS, (op_of(6),), (op_of(6), op_of(7))],
            7,
            (1,),
            f"rank 1 has not reached operation 7, {IN_5}, and rank 0 waits",
        ),
        ([WAITS, WAITS], 7, (0, 1), f"ranks 0, 1 wait for 7, {IN_5}"),
        ([(NOT_WAITED_FOR, op_of(7, state="failed"))] * 3, 7, (0, 1, 2), "wait for 7"),
        (
            [(NOT_WAITED_FOR,), (op_of(6),), (op_of(6),)],
            6,
            (0,),
            f"operation 6, {IN_5}, failed on rank 0",
        ),
        (
            [tuple(op_of(n) for n in range(start, 20)) for start in (0, 9, 12)],
            -1,
            (),
            "all ranks agree up to operation 19",
        ),
        (
            [WAITS, (op_of(3, state="waited for"),), WAITS],
            6,
            (1,),
            f"rank 1 has not reached operation 6, {IN_5}, and ranks 0, 2 wait",
        ),
    ],
    ids=["together", "other", "behind", "no flight", "not waited", "failed", "ring", "far behind"],
)
def test_ranks_are_lined_up(
    ops_by_rank: list[tuple[FlightOp, ...]], number: int, ranks: tuple[int, ...], text: str
) -> None:
    (found,) = find_divergences(flight_of(log_of(r, *ops)) for r, ops in enumerate(ops_by_rank))
    assert (found.number, found.ranks) == (number, ranks)
    assert text in found.text
    assert ("rank 2: no flight" in found.text) == (len(ops_by_rank) < 3)


def test_failures_are_reported_with_reason_and_delay() -> None:
    """A launcher's signal after the failure does not take the reason's place."""
    log = log_of(0, op_of(7, state="failed"), size=2)
    first = replace(flight_of(log), reason=f"no word from rank 1\n{'x' * 999}")
    ended = replace(flight_of(log, taken_s=1.8e9 + 9.0), reason="SIGTERM")
    late = log_of(1, op_of(7, state="failed"), size=2)
    other = replace(flight_of(late, taken_s=1.8e9 + 5.0), reason="s" * 999)
    for flights in ([first, ended, other], [ended, other, first]):
        (found,) = find_divergences(flights)
        lines = found.text.splitlines()
        assert lines[2] == "    no word from rank 1"
        assert lines[4] == f"    5.0 s later: {'s' * 238}.."
        assert len(lines) == 5
    again = flight_of(replace(log, made_s=1.8e9 + 1.0), taken_s=1.8e9 + 9.0)
    (found,) = find_divergences([first, again])
    assert "no word from rank 1" not in found.text, "that was a run before"


def test_of_several_flights_of_a_rank_the_newest_counts() -> None:
    old = flight_of(log_of(0, op_of(1, bucket=3), size=1), taken_s=1.0)
    new = flight_of(log_of(0, op_of(1), size=1), taken_s=2.0)
    for order in ([old, new], [new, old]):
        (found,) = find_divergences(order)
        assert "bucket 0" in found.text


def test_groups_of_the_same_ranks_are_distinguished_by_order() -> None:
    flights = [flight_of(log_of(r, op_of(1)), log_of(r, op_of(2 + r)), pid=r) for r in range(3)]
    first, second = find_divergences(flights)
    assert first.number == -1
    assert (second.number, second.ranks) == (4, (0, 1))


def of_run(made_s: float, taken_s: float, rank: int, *ops: FlightOp) -> Flight:
    log = replace(log_of(rank, *ops), made_s=made_s)
    return flight_of(log, pid=int(made_s) + rank, taken_s=taken_s)


def test_flights_of_a_run_before_are_left_out() -> None:
    """Rank 1 was killed in the first run and rank 2 in the second; both leave nothing of that."""
    first = [of_run(100.0, 4000.0, r, op_of(5000, state="failed")) for r in (0, 2)]
    second = [of_run(4100.0, 8000.0, r, op_of(39), op_of(40, state="failed")) for r in (0, 1)]
    for order in ([*first, *second], [*second, *first]):
        (found,) = find_divergences(order)
        assert (found.number, found.ranks) == (40, (0, 1))
        assert found.text.splitlines()[-1] == (
            "  rank 2: no flight; one of an earlier run is ignored, taken 100.0 s before the "
            "others' GradSync #1 was created"
        )
    (found,) = find_divergences(first)
    assert "no flight; one" not in found.text


def test_flights_of_one_run_are_kept() -> None:
    """Ranks that were created one after the other, and one whose clock was set back."""
    (found,) = find_divergences(of_run(100.0 + r, 200.0 + r, r, op_of(5)) for r in range(3))
    assert "all ranks agree up to operation 5" in found.text
    (found,) = find_divergences([of_run(100.0, 50.0, 0, op_of(5))])
    assert "  rank 0: at step 5" in found.text


def test_ranks_of_a_part_of_the_job_have_both_numbers() -> None:
    def log(rank: int, *ops: FlightOp) -> FlightLog:
        return replace(log_of(rank, *ops), members=(0, 2, 9))

    flights = [
        flight_of(log(0, op_of(6), op_of(7, state="failed"))),
        flight_of(log(1, op_of(6))),
    ]
    (found,) = find_divergences(flights)
    assert found.text.splitlines() == [
        "GradSync #1, ranks 0 to 2 (global 0, 2, 9): rank 1 (global 2) has not reached operation "
        "7, all_reduce of bucket 0 (w0) of step 5, and rank 0 waits",
        "  rank 0: at step 5, in backward; last: 7, all_reduce of bucket 0 (w0) of step 5, failed",
        "    as an example",
        "  rank 1 (global 2): at step 5, in backward; last: 6, all_reduce of bucket 0 (w0) of "
        "step 5, done",
        "  rank 2 (global 9): no flight",
    ]
    assert "GradSync #1: rank 1 (global 2) of 3 over shm" in str(flights[1])
    many = replace(log(0), members=tuple(range(1, 400)))
    (found,) = find_divergences([flight_of(many)])
    assert found.text.startswith("GradSync #1, ranks 0 to 398 (global 1, 2, 3, 4, 5, 6, .., 399): ")


ops = st.builds(
    FlightOp,
    number=st.integers(0, 30),
    step=st.integers(0, 3),
    kind=st.sampled_from(["all_reduce", "control", "pmean \x1b[2J, called at x.py:3"]),
    bucket=st.integers(-1, 2),
    leaves=st.text(max_size=5),
    nbytes=st.integers(-1, 2**40),
    launched_s=st.floats(0, 1e9),
    waited_s=st.none() | st.floats(0, 1e9),
    done_s=st.none() | st.floats(0, 1e9),
    state=st.sampled_from(["in flight", "waited for", "done", "failed"]),
)
flights = st.builds(
    Flight,
    host=st.text(max_size=5),
    pid=st.integers(0, 2**22),
    taken_s=st.floats(0, 1e12),
    reason=st.text(max_size=5),
    logs=st.lists(
        st.builds(
            FlightLog,
            name=st.sampled_from(["GradSync #1", "GradSync #2"]),
            members=st.just((0, 1, 2)),
            rank=st.integers(0, 2),
            transport=st.text(max_size=5),
            timeout_s=st.floats(0, 1e9),
            step=st.integers(0, 2**40),
            phase=st.text(max_size=5),
            ops=st.lists(ops, max_size=6).map(tuple),
            made_s=st.floats(0, 1e12),
        ),
        max_size=3,
    ).map(tuple),
)


@settings(max_examples=40)
@given(st.lists(flights, max_size=3))
def test_flights_are_read_as_they_were_written(some: list[Flight]) -> None:
    for one in some:
        assert Flight.from_json(one.to_json()) == one
        assert "\x1b" not in str(one)
    for divergence in find_divergences(some):
        assert "\x1b" not in divergence.text
        assert set(divergence.ranks) <= {0, 1, 2}


def test_control_characters_are_escaped() -> None:
    one = flight_of(log_of(0, op_of(1, leaves="layer\x1b[2J.w"), name="GradSync\n#1"))
    assert "layer\\x1b[2J.w" in str(one)
    (found,) = find_divergences([one])
    assert found.text.startswith("GradSync\\n#1, ranks 0 to 2: ")
    assert "(layer\\x1b[2J.w)" in found.text


@pytest.mark.parametrize("text", ["", "[", "3", "[]", "{}", "[" * 100_000, "9" * 10_000])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a flight: "):
        Flight.from_json(text)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("rank", "3", "rank 3 is not one of 3 members"),
        ("rank", "-1", "rank -1 is not one of 3 members"),
        ("taken_s", "1e999", "inf is not a finite number"),
        ("made_s", "NaN", "nan is not a finite number"),
        ("pid", str(2**63), f"{2**63} is not a finite number below 2**63"),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: str, problem: str) -> None:
    text = flight_of(log_of(0, op_of(1))).to_json()
    (changed, count) = re.subn(f'"{field}": [^,]*', f'"{field}": {value}', text)
    assert count == 1
    with pytest.raises(ValueError, match=re.escape(f"not a flight: {problem}")):
        Flight.from_json(changed)


def test_command_names_unreadable_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, content, text in (
        (tmp_path, None, "there is no flight-*.json in"),
        (tmp_path, "{}", "flight-x.json': not a flight: the value lacks ['format', 'host', "),
        (tmp_path / "nothing", None, "can't read"),
    ):
        if content is not None:
            (tmp_path / "flight-x.json").write_text(content)
        with pytest.raises(SystemExit, match="2"):
            main(["flight", str(place)])
        assert text in capsys.readouterr().err
    os.truncate(tmp_path / "flight-x.json", 2**26 + 1)
    with pytest.raises(SystemExit, match="2"):
        main(["flight", str(tmp_path)])
    assert "is no flight: it has more than 67108864 bytes" in capsys.readouterr().err


def test_processes_of_several_hosts_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, host in enumerate(["host", "other", "other"]):
        one = replace(flight_of(log_of(rank, op_of(1)), pid=7), host=host)
        (tmp_path / f"flight-{rank}.json").write_text(one.to_json())
    assert main(["flight", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("3 flights of 2 processes\n")


def test_operations_fit_a_terminal_of_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long names lose their beginning. A wide terminal and a file have all."""
    leaves = f"{'encoder.' * 12}weight .. {'encoder.' * 12}bias"
    ops = (
        op_of(41_234, step=10_308, leaves=leaves, nbytes=26_214_400, launched_s=12.3456),
        op_of(41_235, kind="reduce_scatter", leaves=leaves, state="waited for", done_s=None),
        op_of(41_236, kind="psum of train.py:103", step=-1, bucket=-1, leaves="", nbytes=-1),
    )
    (tmp_path / "flight-x.json").write_text(flight_of(log_of(0, *ops)).to_json())
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["flight", str(tmp_path), "--all"]) == 0
    assert leaves in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["flight", str(tmp_path), "--all"]) == 0
    table = capsys.readouterr().out.splitlines()[-4:]
    assert max(map(len, table)) <= 80
    number, step, *_, size, unit, launched, _, done, _ = table[1].split()
    assert (number, step, size, unit) == ("41234", "10308", "25", "MiB")
    assert (launched, done) == ("-12.3", "+200")
    assert "er.bias" in table[1]
    assert table[2].endswith("waited for")
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["flight", str(tmp_path), "--all"]) == 0
    assert leaves in capsys.readouterr().out
