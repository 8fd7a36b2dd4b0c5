"""Fuzzed input from outside: a documented error, or a valid value."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import pickle
import random
import re
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp.cli.main import main
from fddp.core.sim.cost import CostModel
from fddp.native import extension
from fddp.telemetry.flight.log import Flight, FlightLog, FlightOp
from fddp.transport.liveness.bounded_store import BoundedStore, StoreClientThread
from fddp.transport.liveness.failure import Report
from fddp.transport.liveness.membership import Membership
from fddp.transport.shm.fd_passing import FdListener, connect
from fddp.transport.shm.host_discovery import StagedExchange, _HostDiscovery, _is_arena_offset
from fddp.tree.pytree import tree_map
from tests.faults.fuzz.targets import TARGETS, one_input
from tests.support.example_plans import example_plan, example_schedule
from tests.support.hook_models import SMALL
from tests.support.json_documents import JSON, mutants
from tests.support.on_ranks import on_processes, on_threads
from tests.support.process_resources import open_files

MIB = 1 << 20

# Documents


def flight() -> Flight:
    op = FlightOp(0, 0, "all_reduce", 0, "w", 8, 0.5, 0.1, 0.2, "done")
    log = FlightLog("GradSync 0", (0, 1), 0, "shm", 60.0, 1, "between steps", (op, op))
    return Flight("host", 7, 1.8e9, "as an example", (log,))


class Reader(NamedTuple):
    """A reader of documents, and a document that it accepts."""

    read: Callable[[str], Any]
    text: str


READERS = {
    "plan": Reader(fddp.BucketPlan.from_json, example_plan().to_json()),
    "schedule": Reader(fddp.Schedule.from_json, example_schedule().to_json()),
    "cost": Reader(CostModel.from_json, fddp.PRESETS["nvlink4"].to_json()),
    "flight": Reader(Flight.from_json, flight().to_json()),
}


def check(reader: Reader, text: str) -> None:
    """Reads a text: a ValueError, or a value that can be shown and written."""
    tracemalloc.start()
    found = None
    try:
        found = reader.read(text)
    except ValueError:
        pass
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # What is read takes some dozen times its text; a number in it may not be taken for a size.
    assert peak_bytes <= 4 * MIB + 200 * len(text), peak_bytes
    if found is not None:
        repr(found), str(found)
        assert reader.read(found.to_json()) == found or "NaN" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_changed_documents(name: str, data: st.DataObject) -> None:
    check(READERS[name], data.draw(mutants(READERS[name].text)))


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=50, deadline=None)
@given(text=st.one_of(JSON.map(json.dumps), st.text()))
@example(text="[" * 100_000)
@example(text='{"a":' * 100_000)
@example(text="1" * 100_000)
@example(text='{"format":1,"format":2}')
@example(text="\ufeff{}")
def test_arbitrary_text_is_read_or_refused(name: str, text: str) -> None:
    check(READERS[name], text)


# State of hooks, as a checkpoint may hold it


@on_threads(2)
def test_states_of_hooks(group: Any) -> None:
    params = {"w": torch.ones(6), "b": torch.ones(3, dtype=torch.float64)}
    with fddp.GradSync(params, group=group, hook=fddp.hooks.power_sgd(1), **SMALL) as sync:
        good = sync.init_state()

        def spoilt(change: Callable[[Tensor], Any]) -> Any:
            return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, good)

        for state in [
            *(None, (), list(good), good[:-1], (*good, good[0])),
            *(tuple(None for _ in good), tuple({} for _ in good)),
            *(spoilt(lambda leaf: leaf.double().half()), spoilt(lambda leaf: leaf.flatten()[:0])),
            spoilt(lambda leaf: leaf.to("meta")),
            *(spoilt(lambda leaf: b"cos\nsystem\n(S'false'\ntR."), spoilt(lambda leaf: 10**400)),
            *(b"\x80\x04\x95", "state", torch.optim.SGD),
        ]:
            with pytest.raises((fddp.TreeMismatchError, ValueError)) as caught:
                sync.update(params, state)
            assert caught.type in (fddp.TreeMismatchError, ValueError), state
        mean, _ = sync.update(params, good)
        assert torch.equal(mean["b"], params["b"])


# What other ranks send


class Peers:
    """A transport on which rank 1 says what it likes."""

    rank, world_size = 0, 2

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def exchange(self, payload: bytes) -> list[bytes]:
        return [payload, self._payload]


PAYLOADS = st.one_of(
    st.binary(max_size=40),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.tuples(JSON, JSON).map(lambda pair: json.dumps(pair).encode()),
    JSON.map(lambda value: json.dumps([None, value]).encode()),
    st.just(b"[" * 100_000),
)


@settings(max_examples=200, deadline=None)
@given(PAYLOADS)
def test_malformed_answers_of_neighbours_are_refused(payload: bytes) -> None:
    exchange = StagedExchange(Peers(payload))  # type: ignore[arg-type]
    own, theirs = exchange.stage(lambda: [3, 1], (int, int), _is_arena_offset)
    assert own == [3, 1]
    assert 0 not in exchange.problems
    assert theirs is None or (theirs[1] < theirs[0] and 1 not in exchange.problems)
    if 1 in exchange.problems:
        assert isinstance(exchange.problems[1], str)
        assert len(exchange.problems[1]) <= 300
        assert exchange.stopped([1])


@settings(max_examples=100, deadline=None)
@given(PAYLOADS)
def test_malformed_store_values_are_refused(payload: bytes) -> None:
    store = torch.distributed.HashStore()
    calls = [Membership(store, rank, 2) for rank in range(2)]
    for call in calls:
        call.store = BoundedStore(store, StoreClientThread())
    calls[0].report(Report("timeout", (0, 1)))
    store.set("report/1", payload)
    store.set("alarm", payload)
    outcome = calls[0].reports(0.0)
    assert outcome[0] == Report("timeout", (0, 1))
    assert all(type(rank) is int for rank in outcome.get(1, outcome[0]).ranks)
    assert calls[0].read_step_failure(3) is None or payload.startswith(b"[3")


@settings(max_examples=50, deadline=None)
@given(st.one_of(PAYLOADS, st.sampled_from([b"[9]", b"[0, 0]", b"[Infinity]"])), st.integers(0, 5))
def test_messages_of_descriptors(note: bytes, count: int) -> None:
    """Whatever is sent through the socket, no descriptor is left open."""
    before = open_files()
    with ExitStack() as sockets:
        listener = FdListener()
        sockets.callback(listener.close)
        caller = connect(listener.name)
        assert caller is not None
        sockets.callback(caller.close)
        (line,) = listener.accept()
        search = _HostDiscovery(1, sockets)
        search._leader = line
        sockets.callback(line.close)
        null = os.open(os.devnull, os.O_RDONLY)
        caller.send(note[:4000] or b" ", [null] * count)
        os.close(null)
        with suppress(ValueError, OSError):
            search._receive_all((0, 1))
    assert open_files() == before


# Shared memory of a peer


def memfd(size: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize(
    ("size", "seals", "why"),
    [
        (4096, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, "the file's size is not sealed"),
        (0, SEALED, "the file has 0 bytes"),
        (1 << 50, SEALED, "the span of 1125899906842624 bytes is invalid"),
    ],
)
def test_memory_that_is_no_arena(size: int, seals: int, why: str) -> None:
    """Beside what `tests/transport/test_shm_arena.py` has."""
    fd = memfd(size, seals)
    try:
        with pytest.raises(ValueError, match=why):
            extension.compiled.ShmView(fd, size)
    finally:
        os.close(fd)
    with pytest.raises(ValueError, match="does not refer to an anonymous file"):
        extension.compiled.ShmView(-1, 4096)


@pytest.mark.parametrize("garbage", [b"\x00", b"\xff", b"\x7f"])
def test_a_corrupt_control_block_ends_in_an_error(garbage: bytes) -> None:
    """Rank 1's slot and everything else in the control block is overwritten while rank 0 waits."""
    arenas = [extension.compiled.ShmArena(8 * MIB) for _ in range(2)]
    control_block = arenas[0].make_control_block(2)
    assert control_block is not None
    views = [extension.compiled.ShmView(arena.fd, arena.span) for arena in arenas]
    backend = extension.compiled.ShmBackend(arenas[0], [None, views[1]], 0, control_block, 0.3, 2)
    work = backend.start("all_reduce", torch.ones(100_000))
    views[0].write(control_block, garbage * 16_000)  # smaller than that of two members
    status = extension.compiled.SHM_PENDING
    for _ in range(100):
        status = work.status_within(0.1)
        if status != extension.compiled.SHM_PENDING:
            break
    assert status in (
        extension.compiled.SHM_TIMEOUT,
        extension.compiled.SHM_CORRUPT,
        extension.compiled.SHM_LOST,
    )
    backend.shutdown()


# The functions of the extension


@on_processes(1)
def test_hostile_arguments_of_compiled_functions(rank: int, world_size: int) -> None:
    """In a process of its own, which a crash would end."""
    chance = random.Random(7)
    tried = {one_input(chance.randbytes(chance.randrange(1, 200))) for _ in range(1000)}
    assert tried == {*TARGETS}


def test_layouts_live_as_long_as_slots_that_are_armed() -> None:
    """A use after free that AddressSanitizer found: Python had released the layout."""
    module = extension.load()
    leaves = module.LeafSet([torch.ones(3)])
    buffer = torch.zeros(3)
    slot = module.EagerSlot(0, buffer, module.Layout([0], [(3,)], [(1,)], 3), 2.0)
    leaves.arm(module.BucketMembers([[0]]), [1], [slot], lambda *_: None)
    del slot
    others = [module.Layout([0], [(5,)], [(1,)], 5) for _ in range(100)]  # in that memory
    leaves.leaves[0].sum().backward()
    assert buffer.tolist() == [2.0, 2.0, 2.0]
    assert len(others) == 100


# The command line


ODD = [
    "",
    "-",
    "--",
    "nan",
    "-1",
    "1e999",
    "\x00",
    "a" * 5000,
    ",tree" * 2000,
    "x=",
    "=",
    "é",
    "%s",
]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_command_line(data: st.DataObject, files: dict[str, str]) -> None:
    commands = [
        f"plan {files['plan']}",
        f"simulate {files['plan']} --topology host=2,local=2 --cost nvlink4 --backward-ms 5 "
        f"--algorithm hierarchical",
        f"simulate {files['plan']} --topology w=2 --cost {files['cost']} --ready {files['times']} "
        f"--jitter 0.1,0.1,2",
        f"flight {files['flight']}",
    ]
    words = data.draw(st.sampled_from(commands)).split()
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(1, len(words) - 1))
        odd = st.one_of(st.sampled_from([*ODD, *files.values()]), st.text(max_size=5))
        words[at] = data.draw(odd)
    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code  # type: ignore[assignment]
    assert code in (0, 1, 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files that are right, and others, by what they hold."""
    contents = {
        "plan": READERS["plan"].text,
        "cost": READERS["cost"].text,
        "flight": READERS["flight"].text,
        "times": "[0.1, 0.2, 0.3, null, 0.5]",
        "deep": "[" * 100_000,
        "large numbers": "[" + ", ".join(["1" + "0" * 400] * 5) + "]",
        "nothing": "",
    }
    folder = tmp_path_factory.mktemp("files")
    for name, text in contents.items():
        (folder / f"{name}.json").write_text(text)
    (folder / "bytes.json").write_bytes(b"\xff\xfe\x00")
    return {path.stem: str(path) for path in folder.iterdir()}


# Nothing is unpickled

_PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# Collectives of objects pickle.
_UNPICKLING = re.compile(r"((gather|broadcast|scatter|send|recv)_object(_list)?|read_pickle)$")


def unpickling(source: str) -> list[str]:
    """Places in which a module may unpickle its input, or run it as code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in _PICKLING]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _PICKLING:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            weights_only = any(
                word.arg == "weights_only" and ast.unparse(word.value) == "True"
                for word in node.keywords
            )
            if (
                _UNPICKLING.search(called)
                or called in ("eval", "exec")
                or (called == "torch.load" and not weights_only)
            ):
                found.append(called)
    return found


@pytest.mark.slow
def test_nothing_is_unpickled() -> None:
    package = Path(fddp.__file__).parent
    found = {
        str(path.relative_to(package)): calls
        for path in package.rglob("*.py")
        if (calls := unpickling(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "dist.all_gather_object(found, own)",
        "dist.broadcast_object_list([own])",
        "eval(text)",
    ],
)
def test_uses_of_pickle_are_found(source: str) -> None:
    assert unpickling(source)


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("it was unpickled",))


def test_a_pickle_is_no_document() -> None:
    bomb = pickle.dumps(Bomb())
    for reader in READERS.values():
        with pytest.raises(ValueError, match=r"not a JSON document|invalid JSON"):
            reader.read(bomb.decode("latin-1"))
    exchange = StagedExchange(Peers(bomb))  # type: ignore[arg-type]
    exchange.stage(lambda: None)
    assert "malformed message" in exchange.problems[1]
