"""Messages of other ranks: read if well-formed, else an error that names the sender."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fddp
from fddp.collectives.replicas.chunked_broadcast import broadcast_text
from fddp.collectives.replicas.snapshot import Snapshot, allocate_like
from fddp.core.protocol.messages import AnyOf, MappingOf, decode, optional
from fddp.runtime.agreement import Rebuild, SyncConfig
from fddp.runtime.failures import exchange_reports
from fddp.runtime.nonfinite import COUNTS, Count, NonFiniteCounts
from fddp.sync.terms_codec import plan_on_leaves, terms_from_json, terms_to_json
from fddp.transport import base
from fddp.transport.base import Transport
from fddp.transport.liveness.status import RankStatus, format_statuses
from fddp.transport.liveness.status_store import StoreStatusBoard
from tests.support.example_plans import example_plan, example_schedule
from tests.support.hook_models import SMALL
from tests.support.json_documents import JSON, mutants

# Forms


@pytest.mark.parametrize(
    ("text", "form", "problem"),
    [
        ("true", int, "the value is True, expected an int"),
        ("1", bool, "the value is 1, expected true or false"),
        ("1.0", int, "the value is 1.0, expected an int"),
        ("18446744073709551616", int, "the value is 18446744073709551616, expected an int"),
        ("[1, 2]", (int,), "the value is [1, 2], expected a list of 1"),
        ("{}", {"a": int}, "the value lacks ['a'], expected an object with the fields a"),
        ('{"a": 1, "b": 2}', {"a": int}, "expected an object with the fields a"),
        ('{"a": [null]}', {"a": [str]}, r".a[0] is None, expected a string"),
        ('"b"', AnyOf(("a", None)), "the value is 'b', expected 'a' or None"),
        ('{"x": 1, "y": "z"}', MappingOf(int), ".'y' is 'z', expected an int"),
        ("[]", MappingOf(int), "the value is [], expected an object"),
        ("[" * 100_000, object, "invalid JSON: maximum recursion depth"),
        ("1" * 5000, int, "invalid JSON: Exceeds the limit"),
        ("", object, "invalid JSON: Expecting value"),
        (b"\xff\x80\x00", object, "invalid JSON"),
    ],
)
def test_malformed_messages_are_located(text: Any, form: Any, problem: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is compared
        decode(text, form)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (1, float),
        (1.5, float),
        (None, optional(int)),
        ([["w", [3], None]], [(str, [int], optional([int]))]),
        ([], [int]),
        ([], ()),
        ({"a": {"b": True}}, {"a": MappingOf(bool)}),
        ("text", AnyOf(("auto", "text"))),
    ],
)
def test_well_formed_messages_are_read(value: Any, form: Any) -> None:
    assert decode(json.dumps(value), form) == value


# Documents of other ranks, changed


class Wants(NamedTuple):
    """A group of so many ranks."""

    world_size: int = 4


def terms() -> SyncConfig:
    return SyncConfig(
        plan=example_plan(),
        given=False,
        transport="auto",
        reduce_dtype="float32",
        algorithm="hierarchical",
        topology=fddp.Topology(host=2, local=2),
        schedule=example_schedule(),
        rebuild=Rebuild((16, 64), True),
        nonfinite="skip",
    )


def state() -> Snapshot:
    state = {"w": torch.ones(2, 3), "seen": 7, "rate": 0.1, "name": "adam", "of": (None, [True])}
    return Snapshot.of(state)


def from_text(text: str) -> SyncConfig:
    return terms_from_json(text, None, Wants(), None, None)  # type: ignore[arg-type]


def as_described(text: str) -> Snapshot:
    return allocate_like(text, None)


def counts(text: str) -> NonFiniteCounts:
    return NonFiniteCounts.from_json(decode(text, COUNTS))


def tuned(text: str) -> fddp.BucketPlan:
    found = fddp.BucketPlan.from_json(text)
    plan_on_leaves(found, example_plan().leaves)
    return found


class Written(NamedTuple):
    """A reader of messages, a well-formed message, and the writer."""

    read: Callable[[str], Any]
    text: str
    write: Callable[[Any], str]


FOUND = NonFiniteCounts({"w": Count(1, 2)}, {"b": Count(0, 3)}, 4, {"r": Count(1, 0)})
WRITTEN = {
    "terms": Written(from_text, terms_to_json(terms()), terms_to_json),
    "state": Written(as_described, state().description(), Snapshot.description),
    "counts": Written(
        counts, json.dumps(FOUND.to_json()), lambda found: json.dumps(found.to_json())
    ),
    "tuned plan": Written(tuned, example_plan().to_json(), fddp.BucketPlan.to_json),
}


def check(name: str, text: str) -> None:
    """A ValueError, or a value that is written as it was read."""
    try:
        found = WRITTEN[name].read(text)
    except (ValueError, fddp.PlanMismatchError):
        return
    except RuntimeError as error:
        # A state of any size is one, where there is memory for it.
        if name != "state" or not re.search("memory|overflow|too large", str(error)):
            raise
        return
    wanted = json.loads(text)
    if name == "terms" and len(wanted["topology"]) == 1:
        wanted["topology"][0][1] = Wants().world_size  # a single axis follows the number of ranks
    assert json.loads(WRITTEN[name].write(found)) == wanted


@pytest.mark.parametrize("name", WRITTEN)
def test_messages_of_ranks_are_read(name: str) -> None:
    reader, text, write = WRITTEN[name]
    assert write(reader(text)) == text


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_messages_are_refused_or_valid(name: str, data: st.DataObject) -> None:
    check(name, data.draw(mutants(WRITTEN[name].text)))


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=40, deadline=None)
@given(text=st.one_of(JSON.map(json.dumps), st.text()))
@example(text="[" * 100_000)
@example(text="1" * 100_000)
def test_arbitrary_text_is_refused(name: str, text: str) -> None:
    check(name, text)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("rebuild", [[], True], "the plan is to be rebuilt with the caps []"),
        ("rebuild", [[16, 0], True], "the plan is to be rebuilt with the caps [16, 0]"),
        ("topology", [["host", 2], ["host", 2]], "two of the axes [['host', 2], ['host', 2]] have"),
    ],
)
def test_terms_that_make_no_sense(field: str, value: Any, problem: str) -> None:
    text = json.dumps({**json.loads(WRITTEN["terms"].text), field: value})
    with pytest.raises(ValueError, match=re.escape(problem)):
        from_text(text)


@pytest.mark.parametrize("text", [b"", b"7", b"a\nb", b"\xff\xfe"])
def test_malformed_reports_of_failures_do_not_hide_the_others(text: bytes) -> None:
    transport: Any = SimpleNamespace(
        abandoned=[],
        close_abandoned=lambda keys: None,
        exchange=lambda payload, topic: [payload, text],
    )
    own, other = exchange_reports(transport, "3", "abc", "step", "no: 1\n2")
    assert own == ("3", "abc", "step", [], "no: 1\n2")
    assert other.failure == f"it sent a malformed report: {text!r}"


class Sends:
    """A transport that brings one text."""

    rank = 0
    control_device = torch.device("cpu")

    def __init__(self, text: bytes) -> None:
        self._text = text

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def broadcast(self, memory: torch.Tensor, src: int) -> Any:
        memory.copy_(torch.frombuffer(bytearray(self._text), dtype=torch.uint8))
        return self

    def wait(self, what: str) -> None:
        pass


def test_texts_of_another_rank() -> None:
    def passed(length: int) -> str:
        return broadcast_text(Sends(b"\x80plan"), "", length, 3, "the plan")  # type: ignore[arg-type]

    with pytest.raises(fddp.DesyncError, match="rank 3 sent a malformed 'the plan' message"):
        passed(5)
    for length in (-1, 2**31 + 1, 10**18):
        with pytest.raises(fddp.DesyncError, match=f"its text has {length} bytes"):
            passed(length)


# Ranks that say something else than others can read


def build(group: Any) -> None:
    fddp.GradSync({"w": torch.ones(3)}, group=group, **SMALL).close()


def reconcile(group: Any) -> None:
    fddp.reconcile({"w": torch.full((3,), float(group.rank))}, group, step=group.rank)


def rebuild(group: Any) -> None:
    with fddp.GradSync({"w": torch.ones(3)}, group=group, **SMALL) as sync:
        sync.rebuild(group)


def find_nan(group: Any) -> None:
    with fddp.GradSync({"w": torch.ones(3)}, group=group, nonfinite="raise", **SMALL) as sync:
        sync({"w": torch.full((3,), torch.nan)})


def broadcast(group: Any) -> None:
    fddp.broadcast({"w": torch.ones(3)}, src=0, group=group)


def open_communicator(group: Any) -> None:
    fddp.Communicator(group).close()


CALLS = {
    "build": (build, "terms", 0),
    "own state": (reconcile, "own state", 0),
    "newest state": (reconcile, "newest state", 0),
    "digest": (reconcile, "digest", 0),
    "progress": (rebuild, "progress", 0),
    "rebuilt terms": (rebuild, "terms", 1),
    "counts": (find_nan, "counts", 0),
    "broadcast": (broadcast, "terms", 0),
    "communicator": (open_communicator, "terms", 0),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("text", [b"", b"[]", b'{"failure":1}', b"[[null]]", b"\xff", b"[1,2,3]"])
def test_invalid_arguments_are_raised_on_every_rank(
    name: str, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, end, number = CALLS[name]
    own = Transport.exchange
    said = {0: 0, 1: 0}

    def exchange(self: Transport, payload: bytes, other_end: str = "terms") -> list[bytes]:
        if other_end == end and payload.startswith((b"[", b"{", b'"')):
            said[self.rank] += 1
            if self.rank == 1 and said[1] == number + 1:
                payload = text
        return own(self, payload, other_end)

    monkeypatch.setattr(Transport, "exchange", exchange)

    def ended(group: Any) -> str:
        with pytest.raises(fddp.DesyncError) as caught:
            call(group)
        return str(caught.value)

    for outcome in fddp.loopback(2, ended):
        assert "rank 1 sent a malformed '" in outcome
        assert outcome.endswith("run the same version of fddp on every rank")


def test_an_invalid_length_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody makes room for it."""
    own = base.gather_bytes

    def gather(transport: Any, payload: bytes, *others: Any) -> list[bytes]:
        if transport.rank == 1 and payload.startswith(b"terms"):
            payload = payload[:16] + (2**62).to_bytes(8, "big") + payload[24:]
        return own(transport, payload, *others)

    monkeypatch.setattr(base, "gather_bytes", gather)

    def ended(group: Any) -> str:
        with pytest.raises(fddp.DesyncError) as caught:
            broadcast(group)
        return str(caught.value)

    for outcome in fddp.loopback(2, ended):
        assert f"rank 1 sent a malformed 'terms' message: it has {2**62} bytes" in outcome


# What lies in the store of a job


ANSWERS = st.one_of(
    st.binary(max_size=40),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.tuples(*[JSON] * 6).map(lambda five: json.dumps(five).encode()),
    st.just(b"[" * 100_000),
    st.just(json.dumps([10**9, "", ["x" * 10**5] * 100, "\x1b[31m" * 10**5, ""]).encode()),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    answer=ANSWERS,
    question=st.one_of(st.just(b"0"), st.binary(max_size=20)),
    key=st.sampled_from(["", "0/1"]),
)
def test_status_is_reported_under_any_store_content(
    answer: bytes, question: bytes, key: str
) -> None:
    """Explaining another failure never fails itself."""
    store = dist.HashStore()
    board = StoreStatusBoard(store, 0, 2)
    board._store.set("answer/1", answer)
    board._store.set("questions", question)
    board.query()
    board.publish(key)
    found = board.answers([0, 1], key, 0.0)
    assert set(found) == {0, 1}
    assert isinstance(found[0], RankStatus)
    theirs = found[1]
    assert theirs is None or all(
        type(text) is str for text in (*theirs.waits, theirs.last, theirs.at)
    )
    outcome = format_statuses({f"rank {rank}": doing for rank, doing in found.items()})
    assert len(outcome) < 20_000
    assert "\x1b" not in outcome
