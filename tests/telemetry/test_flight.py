"""The flight recorder: what is noted, and how it is written down."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from fddp import Schedule
from fddp.cli.main import main
from fddp.telemetry.flight.log import Flight, FlightOp
from fddp.telemetry.flight.recorder import SIZE
from tests.support.endings import ending
from tests.support.hook_models import late_loss
from tests.support.polling import HANG_S, soon
from tests.support.ranks import RankPool

PARAMS = {"a": torch.zeros(3), "b": torch.zeros(5), "c": torch.zeros(7)}
SMALL = {"bucket_cap_mb": 1e-6, "first_bucket_mb": 1e-6}  # a leaf a bucket


def ones() -> dict[str, Tensor]:
    return fddp.tree_map(torch.ones_like, PARAMS)


# What is noted


def noted(group: Any) -> tuple[FlightOp, ...]:
    with fddp.GradSync(PARAMS, group=group, **SMALL) as sync:
        sync(ones())
        sync(ones())
        return fddp.flight(sync).logs[0].ops


def test_operations_are_noted_in_order_with_leaves_and_bytes() -> None:
    for ops in fddp.loopback(2, noted):
        assert [(op.number, op.step, op.kind, op.bucket, op.leaves, op.nbytes) for op in ops] == [
            (0, 0, "all_reduce", 0, "c", 28),
            (1, 0, "all_reduce", 1, "b", 20),
            (2, 0, "all_reduce", 2, "a", 12),
            (3, 1, "all_reduce", 0, "c", 28),
            (4, 1, "all_reduce", 1, "b", 20),
            (5, 1, "all_reduce", 2, "a", 12),
        ]
        for op in ops:
            assert op.state == "done"
            assert op.waited_s is not None
            assert op.done_s is not None
            assert op.launched_s > op.done_s >= op.waited_s >= 0.0


def kinds_of(group: Any, options: dict[str, Any], how: str) -> list[tuple[Any, ...]]:
    params = {"a": torch.zeros(4, 2), "b": torch.zeros(6)}
    grads = fddp.tree_map(torch.ones_like, params)
    if how == "sparse":
        grads["a"] = grads["a"].to_sparse(1).coalesce()
    with fddp.GradSync(params, group=group, **options) as sync:
        if how == "shards":
            sync.all_gather(sync.reduce_scatter(grads))
        elif how == "uneven":
            for _ in fddp.uneven([1] * group.rank, sync):
                sync(grads)
        else:
            sync(grads)
        ops = fddp.flight(sync).logs[0].ops
        return [(op.kind, op.bucket, op.nbytes, op.state) for op in ops]


@pytest.mark.parametrize(
    ("ranks_of_group", "options", "how", "wanted"),
    [
        (
            4,
            {"algorithm": "hierarchical", "mesh": fddp.Topology(host=2, local=2)},
            "dense",
            [
                ("reduce_scatter", 0, 56, "done"),
                ("all_reduce", 0, 28, "done"),
                ("control", -1, -1, "done"),
                ("all_gather", 0, 56, "done"),
            ],
        ),
        (
            2,
            {"sparse": ["a"]},
            "sparse",
            [("all_reduce", 1, 24, "done"), ("gather", 0, -1, "done")],
        ),
        (
            2,
            {"hook": fddp.hooks.fp16_compress},
            "dense",
            [("all_reduce", 0, 56, "done"), ("control", -1, -1, "done")],
        ),
        (
            2,
            {"algorithm": "reduce_scatter"},
            "shards",
            [
                ("reduce_scatter", 0, 56, "done"),
                ("control", -1, -1, "done"),
                ("all_gather", 0, 56, "done"),
                ("control", -1, -1, "done"),
            ],
        ),
        (2, {}, "uneven", [("vote", -1, 1, "done"), ("all_reduce", 0, 56, "done")]),
    ],
    ids=["hierarchical", "sparse", "hook", "reduce_scatter", "uneven"],
)
def test_every_kind_of_operation_is_noted(
    ranks_of_group: int, options: dict[str, Any], how: str, wanted: list[Any]
) -> None:
    for kinds in fddp.loopback(ranks_of_group, kinds_of, options, how):
        assert sorted(kinds) == sorted(wanted)


def test_repairs_are_noted_as_such() -> None:
    def run(group: Any) -> list[str]:
        params = {f"w{i}": torch.eye(4) for i in range(4)}
        with fddp.GradSync(params, group=group, **SMALL) as sync:
            step = sync.value_and_grad(late_loss)
            step(params, torch.ones(3, 4), False)
            step(params, torch.ones(3, 4), group.rank == 1)
            return [op.kind for op in fddp.flight(sync).logs[0].ops if op.step == 1]

    usual = ["all_reduce"] * 4
    assert fddp.loopback(2, run) == [[*usual, "all_reduce (late)"]] * 2


def test_operators_are_noted_where_they_were_called() -> None:
    def run(group: Any) -> Any:
        with fddp.Communicator(group) as ranks:
            fddp.pmean(torch.ones(3), ranks)
            failed = ending(lambda: fddp.pmean(torch.ones(3 + group.rank), ranks))
            (log,) = fddp.flight(ranks).logs
            return failed.kinds[0], log.at, [(op.step, op.state, op.what) for op in log.ops]

    for kind, at, ops in fddp.loopback(2, run):
        assert (kind, at) == ("DesyncError", "open")
        assert [op[:2] for op in ops] == [(-1, "done"), (-1, "failed")]
        for *_, what in ops:
            assert "pmean" in what
            assert "test_flight.py:" in what


def test_the_newest_hundred_are_kept_and_no_tensor_with_them() -> None:
    def run(group: Any) -> tuple[list[int], list[type]]:
        with fddp.GradSync(PARAMS, group=group, **SMALL) as sync:
            step = sync.value_and_grad(lambda p: sum(leaf.sum() for leaf in p.values()))
            for _ in range(40):
                step(PARAMS)
            numbers = [op.number for op in fddp.flight(sync).logs[0].ops]
            return numbers, [type(x) for x in reachable(sync._engine.recorder)]

    for numbers, kinds in fddp.loopback(2, run):
        assert numbers == list(range(numbers[-1] - SIZE + 1, numbers[-1] + 1))
        assert numbers[-1] >= SIZE
        assert not any(issubclass(kind, Tensor) for kind in kinds)
        assert Schedule in kinds


def reachable(root: object) -> list[object]:
    """Return the objects that `root` keeps alive, except types and code."""
    skipped = (type, types.ModuleType, types.FunctionType, types.MethodType)
    seen: dict[int, object] = {}
    pending = [root]
    while pending:
        one = pending.pop()
        if id(one) not in seen and not isinstance(one, skipped):
            seen[id(one)] = one
            pending.extend(gc.get_referents(one))
    return list(seen.values())


@pytest.mark.slow
def test_flights_of_syncs_that_are_gone_are_gone() -> None:
    def flights(name: str) -> int:
        """Of all groups in this process: their names start at 1 in each."""
        gc.collect()
        return sum(log.name == name for log in fddp.flight().logs)

    def run(group: Any) -> tuple[int, int]:
        sync = fddp.GradSync(PARAMS, group=group)
        name = sync._engine.recorder.name
        sync.close()
        assert fddp.flight(sync).logs[0].phase == "closed"
        before = flights(name)
        del sync
        return before, flights(name)

    [(before, after)] = fddp.loopback(1, run)
    assert after == before - 1


def test_other_objects_have_no_flight() -> None:
    with pytest.raises(TypeError, match=r"flight takes GradSyncs, Communicators and .* got a int"):
        fddp.flight(3)
    with pytest.raises(TypeError, match="reason must be a str, got 3"):
        fddp.flight(reason=3)  # type: ignore[arg-type]


def test_a_flight_has_the_global_rank(ranks: RankPool) -> None:
    assert "(global " in ranks.run(2, in_a_subgroup)[1]


def in_a_subgroup(rank: int, world_size: int) -> str:
    group = dist.new_group([1])
    if rank == 0:
        return ""
    with fddp.GradSync(PARAMS, group=group) as sync:
        return str(fddp.flight(sync))


# Written down


def stall(rank: int, world_size: int, transport: str, directory: str) -> Any:
    gc.collect()  # flights include what earlier tests left to the garbage collector
    sync = fddp.GradSync(PARAMS, **SMALL, transport=transport, timeout_s=2.0)
    step = sync.value_and_grad(lambda p: sum(leaf.sum() for leaf in p.values()))
    step(PARAMS)
    fddp.dump_flights(directory)
    if rank == 1:
        assert soon(lambda: list(Path(directory).glob("*.txt")))
        path = fddp.dump_flights(directory).write("looked into by hand")
    else:
        seen = ending(lambda: step(PARAMS))
        path = Path(seen.text.split(" is in '")[1].split("'")[0])
        assert seen.text.index("timeout_s") < seen.text.index("the flight of this process is in")
        assert fddp.flight(sync).logs[0].phase == "closed"
    return path.read_text(), str(path)


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_failure_dumps_a_flight_and_names_the_file(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    (text, _), _ = ranks.run(2, stall, transport, str(tmp_path))
    assert "SyncTimeoutError: " in text.splitlines()[0]
    # A worker's flights may have failed operations of earlier tests.
    failed = [line for line in text.splitlines() if line.endswith("failed")]
    assert any("all_reduce" in line for line in failed)
    assert "stacks of threads" in text
    assert "value_and_grad.py" in text, "the stack leads through the step"
    assert main(["flight", str(tmp_path)]) == 0
    outcome = capsys.readouterr().out
    assert "2 flights of 2 processes" in outcome
    assert "ranks 0 to 1: rank 1 has not reached operation" in outcome
    assert "of step 1, and rank 0 waits" in outcome
    assert "  rank 1: at step 1, between steps; last: " in outcome
    assert main(["flight", "--all", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(line in shown for line in failed)


def interrupted(rank: int, world_size: int, transport: str, directory: str) -> Any:
    sync = fddp.GradSync(PARAMS, transport=transport, timeout_s=30.0)
    sync(ones())
    if rank == 1:
        assert soon(lambda: list(Path(directory).glob("*.txt")))
        return sync(ones())["a"].tolist(), [], ""
    earlier: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: earlier.append(number))

    def send() -> None:
        assert soon(lambda: any(op.state == "waited for" for op in fddp.flight(sync).logs[0].ops))
        os.kill(os.getpid(), signal.SIGUSR1)

    with fddp.dump_flights(directory, on_signal=signal.SIGUSR1):
        sender = threading.Thread(target=send)
        sender.start()
        result = sync(ones())["a"].tolist()
        sender.join()
    assert signal.signal(signal.SIGUSR1, before) != before, "the earlier handler is back"
    (path,) = Path(directory).glob("*.txt")
    return result, earlier, path.read_text()


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_signal_is_answered_while_the_rank_waits(
    ranks: RankPool, tmp_path: Path, transport: str
) -> None:
    """The other rank comes only once the flight is there."""
    (result, earlier, text), other = ranks.run(2, interrupted, transport, str(tmp_path))
    assert result == other[0] == [1.0, 1.0, 1.0]
    assert earlier == [signal.SIGUSR1]
    assert text.splitlines()[0].endswith(": SIGUSR1")
    assert "at step 1, after backward" in text
    assert any(line.endswith("waited for") for line in text.splitlines())
    assert " wait" in text.split("stacks of threads")[1]


def test_errors_after_which_ranks_are_together_leave_none(tmp_path: Path) -> None:
    def run(group: Any) -> str:
        with fddp.GradSync(PARAMS, group=group) as sync:
            bad = ending(lambda: sync(ones() if group.rank else {"a": torch.ones(3)}))
            sync(ones())
            return bad.text

    with fddp.dump_flights(tmp_path):
        for text in fddp.loopback(2, run):
            assert "the flight of this process" not in text
    assert not list(tmp_path.iterdir())


def test_a_failed_construction_names_the_dump(tmp_path: Path) -> None:
    def run(group: Any) -> str:
        if group.rank == 1:
            return ""
        with fddp.GradSync(PARAMS, group=group, timeout_s=0.5) as sync:
            return repr(sync)

    with fddp.dump_flights(tmp_path), pytest.raises(fddp.FddpError) as caught:
        fddp.loopback(2, run)
    assert f"the flight of this process is in '{tmp_path}/flight-" in str(caught.value)


def test_a_full_disk_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Path:
        raise OSError(28, "No space left on device")

    error = fddp.SyncTimeoutError("rank 3 did not come")
    with fddp.dump_flights(tmp_path) as dumps:
        monkeypatch.setattr(dumps, "write", full)
        fddp.telemetry.flight.dump.dump_on_failure(error)
    assert str(error) == (
        "rank 3 did not come; the flight of this process cannot be written: OSError: [Errno 28] "
        "No space left on device"
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0)])
def test_flights_stop_in_any_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    answered: list[int] = []

    def answer(number: int, _: Any) -> None:
        answered.append(number)

    before = signal.signal(signal.SIGUSR1, answer)
    try:
        all_dumps = [
            fddp.dump_flights(tmp_path / "deep" / str(n), on_signal=signal.SIGUSR1)
            for n in range(3)
        ]
        left = {0, 1, 2}
        for count, stopped in enumerate(order, 1):
            all_dumps[stopped].stop()
            all_dumps[stopped].stop()
            left.remove(stopped)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert len(answered) == count, "the handler from before is called once"
            error = fddp.DesyncError("it")
            fddp.telemetry.flight.dump.dump_on_failure(error)
            if left:
                assert f"deep/{max(left)}/flight-" in str(error), "the newest one's directory"
            else:
                assert str(error) == "it"
            for n in range(3):
                files = list((tmp_path / "deep" / str(n)).iterdir())
                assert bool(files) == (n in left)
                for file in files:
                    if not file.name.endswith(".pid"):
                        file.unlink()
                assert len(list((tmp_path / "deep" / str(n)).iterdir())) == (n in left)
        assert signal.getsignal(signal.SIGUSR1) == answer
    finally:
        signal.signal(signal.SIGUSR1, before)


LAUNCHER = """
import os, signal, subprocess, sys, time
from pathlib import Path
directory = Path(sys.argv[1])
if len(sys.argv) == 2:
    command = [sys.executable, __file__, str(directory), "worker"]
    sys.exit(subprocess.run(command, check=False).returncode)
import fddp
fddp.dump_flights(directory, on_signal=signal.SIGUSR1)
deadline_s = time.monotonic() + 200.0
while not list(directory.glob("flight-*.txt")) and time.monotonic() < deadline_s:
    time.sleep(0.01)
"""


def test_the_signal_goes_to_those_that_have_a_handler(tmp_path: Path) -> None:
    script, directory = tmp_path / "train.py", tmp_path / "flights"
    script.write_text(LAUNCHER)
    launcher = subprocess.Popen([sys.executable, str(script), str(directory)])
    assert soon(lambda: list(directory.glob("*.pid")))
    files = list(directory.glob("*.pid"))
    command = f"cat {directory}/{socket.gethostname()}-*.pid | xargs kill -USR1"
    subprocess.run(["sh", "-c", command], check=True)
    assert launcher.wait(HANG_S) == 0
    (file,) = files
    (flight,) = directory.glob("flight-*.json")
    pid = Flight.from_json(flight.read_text()).pid
    assert file.name == f"{socket.gethostname()}-{pid}.pid"
    assert pid != launcher.pid
    assert not file.exists(), "it goes with the process"


def test_a_signal_that_comes_while_a_flight_is_written_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def write(reason: str) -> Path:
        written.append(reason)
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(3):  # the handler runs between two of these
            pass
        return tmp_path

    with fddp.dump_flights(tmp_path, on_signal=signal.SIGUSR1) as dumps:
        monkeypatch.setattr(dumps, "write", write)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
    assert written == ["SIGUSR1", "SIGUSR1"]


def test_a_failed_flight_dump_does_not_fail_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def write(self, _: str) -> None:
            raise RuntimeError("reentrant call inside")

    def full(_: str) -> Path:
        raise OSError(28, "No space left on device")

    with fddp.dump_flights(tmp_path, on_signal=signal.SIGUSR1) as dumps:
        monkeypatch.setattr(dumps, "write", full)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", Interrupted())
            os.kill(os.getpid(), signal.SIGUSR1)
    outcome = capfd.readouterr().err
    assert outcome.startswith("fddp: no flight was written")
    assert "No space left on device" in outcome


@pytest.mark.parametrize("bad", [3.5, True, "SIGUSR1", 10])
def test_invalid_signals_are_refused(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(
        TypeError, match=r"on_signal must be a signal, such as signal\.SIGUSR1, got"
    ):
        fddp.dump_flights(tmp_path / "made", on_signal=bad)
    assert not (tmp_path / "made").exists()


def test_torn_files_of_a_directory_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a copy leaves them that was interrupted."""
    with fddp.dump_flights(tmp_path) as dumps:
        whole = dumps.write("whole").with_suffix(".json")
    half = tmp_path / "flight-half.json"
    half.write_text(whole.read_text()[:40])
    (tmp_path / "flight-none.json").write_text("")
    assert main(["flight", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 flight of 1 process"
    assert lines[1].startswith(f"left out: {str(half)!r}: not a flight: invalid JSON: ")
    assert lines[2].startswith(f"left out: {str(tmp_path / 'flight-none.json')!r}: not a flight: ")
    with pytest.raises(SystemExit, match="2"):
        main(["flight", str(whole), str(half)])
    assert "flight-half.json': not a flight" in capsys.readouterr().err


def test_a_rank_that_is_lost_to_a_wrapped_forward_leaves_a_flight(tmp_path: Path) -> None:
    def run(group: Any) -> str:
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        model = fddp.DistributedDataParallel(module, process_group=group)
        model(torch.ones(3, 2)).sum().backward()
        assert "all_reduce" in [op.kind for op in fddp.flight(model).logs[0].ops]
        if group.rank == 1:
            return ""
        with fddp.dump_flights(tmp_path), pytest.raises(fddp.errors.RankLostError) as caught:
            model(torch.ones(3, 2))
        return str(caught.value)

    text = fddp.loopback(2, run)[0]
    (path,) = tmp_path.glob("*.txt")
    assert text.endswith(f"; the flight of this process is in {str(path)!r}")
    assert "DistributedDataParallel #" in path.read_text()
