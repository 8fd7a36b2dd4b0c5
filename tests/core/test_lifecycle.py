"""Laws of the life of a step: for every order of events on one rank, and on ranks that meet."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from random import Random
from typing import NamedTuple, cast, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.core.protocol.lifecycle import (
    BETWEEN,
    OWING,
    RUNNING,
    SUSPENDED,
    Action,
    Event,
    Life,
    State,
    advance,
)
from fddp.errors import InternalError
from tests.support.examples import examples

OPENING = ("open", "open in context", "open empty", "take part")
RESULTS: list[Event] = ["reported regular", "reported repair"]
FAILURES: list[Event] = ["reported failure", "reported desync", "transport failed"]
ENDS: list[Event] = ["backward ended", "left open", "left unsent"]
ENDINGS: list[Event] = ["closed", "interrupted", "write failed"]
ABORTS: list[Event] = ["pass aborted", "pass aborted late"]
GRADS: list[Event] = ["grad arrived", "context grad arrived"]
OUTPUTS: list[Event] = ["output reached", "inputs reached"]
ALWAYS: list[Event] = [
    *("outputs made", "due", "voted", "raised", "finalized", "closed", "interrupted"),
]


class World(NamedTuple):
    """What a rank has in hand, on which actions are executed.

    Attributes:
        life: the life.
        is_queued: the end of a running pass is queued.
        is_saved: gradients from before the step are recorded.
        step: the open step has "own" contributions, or "none"; "" if no step is open.
        has_failed: this rank reports a failure in the open step.
        awaits: the report of the open step is awaited.
        is_closed: the communicator is closed.
    """

    life: Life = Life()
    is_queued: bool = False
    is_saved: bool = False
    step: str = ""
    has_failed: bool = False
    awaits: bool = False
    is_closed: bool = False


def possible(world: World) -> list[Event]:
    """Events that may come next."""
    if world.awaits:
        inside: list[Event] = ["due", "voted", "forward began", "outputs made", "interrupted"]
        if world.is_closed:
            return ["transport failed", "closed", *inside]
        changed: list[Event] = ["reported change"] if world.life.name == "complete" else []
        # A signal handler or a communication hook of the user may close the module.
        return [*([] if world.has_failed else RESULTS), *changed, *FAILURES, *inside, "closed"]
    events: list[Event] = [*ALWAYS, "forward began", *OUTPUTS]
    if world.is_queued:
        return [*events, *GRADS, *ENDS, *ABORTS]
    if world.is_saved:  # no gradient is announced
        return [*events, "joined", "left out"] if world.step else [*events, "joined"]
    return [*events, "joined", *GRADS]


def after(world: World, event: Event, fault: Event | None = None) -> World:
    """The world after an event, as callers of `advance` bring it: what is due comes first.

    `fault` follows from the action that it names, if that is executed.
    """
    if "complete owed" in advance(world.life, event)[1]:
        world = executed(world, "due")
        check_hand(world)
        if world.awaits:  # its report comes first
            return world
    world = executed(world, event, fault)
    check_hand(world)
    return world


def executed(world: World, event: Event, fault: Event | None = None) -> World:
    """The world after the actions that follow from an event, each of which must make sense."""
    if event in (*RESULTS, *FAILURES, "reported change"):
        assert world.awaits
        step = "" if event == "reported change" else world.step
        world = world._replace(awaits=False, step=step, has_failed=False)
    if event in (*ENDS, *ABORTS):
        world = world._replace(is_queued=False)
    life, actions = advance(world.life, event)
    world = world._replace(life=life)
    if event in ("closed", "interrupted"):
        assert "abandon" in actions
        world = world._replace(is_closed=True)
    for action in actions:
        if action in OPENING and fault == "open failed":
            return executed(world, fault)
        world = _executed(world, event, action)
        if action == "arm" and fault == "failed":
            world = executed(world, fault)
        if action == "write" and fault == "write failed":
            return executed(world, fault)
    return world


def _executed(world: World, event: Event, action: Action) -> World:
    match action:
        case "queue end" | "forget end":
            assert world.is_queued == (action == "forget end")
            return world._replace(is_queued=not world.is_queued)
        case "save":
            assert not world.is_saved
            assert not world.step
            return world._replace(is_saved=True)
        case "open" | "open in context" | "open empty" | "take part":
            assert not world.step
            is_own = action in ("open", "open in context")
            assert world.is_saved or not is_own
            return world._replace(step="own" if is_own else "none")
        case "arm" | "send":
            assert world.step == "own"
        case "fail":
            assert world.step
            return world._replace(has_failed=True)
        case "await report":
            assert world.step
            assert not world.awaits
            assert not world.is_queued
            return world._replace(awaits=True)
        case "exchange failures":
            assert event in ("reported failure", "reported desync")
        case "abandon":
            assert event in ("transport failed", "closed", "interrupted")
        case "write":
            assert event in RESULTS
            assert world.is_saved
            return world._replace(is_saved=False)
        case "restore" | "forget":
            assert world.is_saved
            assert (action == "forget") == (event == "pass aborted late")
            return world._replace(is_saved=False)
        case "release":
            # A step that was opened has ended, and its gradients are the mean or those from before.
            assert not world.step or event in (*RESULTS, *FAILURES, *ENDINGS)
            assert not (world.step and world.is_saved)
            return world._replace(step="", is_saved=False, has_failed=False, awaits=False)
        case "raise":
            assert not world.step
    return world


HANDS: dict[State, tuple[bool, bool, str, bool]] = {  # by field of `World`
    **dict.fromkeys(BETWEEN, (False, False, "", False)),
    **dict.fromkeys(("touched", "reached"), (True, False, "", False)),
    **dict.fromkeys(("deferred", "unopened"), (True, True, "", False)),
    "open": (True, True, "own", False),
    "suspended": (False, True, "own", False),
    "suspended in context": (False, True, "", False),
    "aborted": (False, False, "own", False),
    "owed": (False, False, "", False),
    **dict.fromkeys(("complete", "dropping"), (False, True, "any", True)),
    **dict.fromkeys(("failing", "joining"), (False, False, "any", True)),
}


def check_hand(world: World) -> None:
    """Check that a state names what the rank has in hand."""
    life, step = world.life, world.step
    expected = HANDS[life.name]
    step = "any" if step and expected[2] == "any" else step
    assert (world.is_queued, world.is_saved, step, world.awaits) == expected, life
    assert not life.expects or life.name != "idle"
    assert life.expects or life.name != "expected"
    assert not life.reached or life.name not in (*BETWEEN, *OWING)


def reachable() -> Iterator[tuple[World, Event, Event | None, World]]:
    """Every transition of worlds that can be reached."""
    known, pending = {World()}, [World()]
    faults: list[Event | None] = [None, "open failed", "failed", "write failed"]
    while pending:
        world = pending.pop()
        for event in possible(world):
            for fault in faults:
                following = after(world, event, fault)
                yield world, event, fault, following
                if following not in known:
                    known.add(following)
                    pending.append(following)


def test_every_order_of_events_keeps_what_a_rank_has_in_hand_in_order() -> None:
    """`executed` and `check_hand` assert the laws: each open step is reported once and released
    once; what was recorded is written, restored or forgotten once; nothing is left in the end."""
    transitions = list(reachable())
    functional = {"armed", "unread"}
    assert {world.life.name for *_, world in transitions} == {*get_args(State)} - functional
    used = {event for _, event, *_ in transitions} | {
        fault for *_, fault, _ in transitions if fault
    }
    assert used == {*get_args(Event)} - {"opened", "armed", "results taken"}
    for world, event, _, following in transitions:
        if event in ABORTS:
            assert not following.is_saved
            assert following.life.name in OWING or following.life.name in ("idle", "expected")
        if following.life.name in SUSPENDED or following.life.name in OWING:
            assert not following.is_queued
        if event == "due":
            assert following.life.name not in OWING
            assert (following.life == world.life) == (world.life.name not in OWING)


REPORTS: list[Event] = [*RESULTS, "reported change", *FAILURES]
IMPOSSIBLE: list[tuple[Iterable[State], list[Event]]] = [
    (BETWEEN, [*ENDS, *ABORTS, *REPORTS, "armed", "failed", "open failed", "left out"]),
    (RUNNING, [*REPORTS, "joined", "left out", "opened"]),
    (RUNNING - {"armed", "open"}, ["failed", "armed", "open failed"]),
    (["unread"], [*ABORTS, *OUTPUTS, *GRADS, *ENDS, "failed", "reported repair", "results taken"]),
    (["armed"], [*ABORTS, *OUTPUTS, *GRADS, "armed", "left open", "finalized"]),
    (SUSPENDED, [*REPORTS, *GRADS, *ENDS, *ABORTS, "opened"]),
    (OWING, [*REPORTS, *ENDS, *ABORTS, "left out"]),
    (["complete", "dropping"], [*GRADS, *OUTPUTS, *ENDS, *ABORTS, "finalized", "raised"]),
    (["failing", "joining"], [*GRADS, *OUTPUTS, *ENDS, *ABORTS, "reported change", "raised"]),
    (["failing"], RESULTS),
    (["dropping"], ["reported change"]),
]


def test_impossible_events_are_errors_that_name_event_and_state() -> None:
    assert {name for names, _ in IMPOSSIBLE for name in names} == {*get_args(State)}
    for names, events in IMPOSSIBLE:
        for name, event in itertools.product(names, events):
            with pytest.raises(InternalError) as caught:
                advance(Life(name), event)
            text = f"the event {event!r} came in the state {name!r} of a step"
            assert str(caught.value) == text


# Lives, event by event


LIVES = """
functional
  opened            -> open
  armed             -> armed
  backward ended    -> complete: await report
  reported regular  -> ended: write, release
functional, lost
  opened            -> open
  failed            -> open: fail
  backward ended    -> complete: await report
  transport failed  -> broken: abandon, restore, release, raise
functional, with a deferred report
  opened            -> open
  backward ended    -> complete: await report
  results taken     -> unread: write, release
  reported regular  -> ended
  opened            -> open
  backward ended    -> complete: await report
  results taken     -> unread: write, release
  reported failure  -> failed: exchange failures, raise
  opened            -> open
  backward ended    -> complete: await report
  results taken     -> unread: write, release
  transport failed  -> broken: abandon, raise
functional, started and awaited
  opened            -> open
  left open         -> suspended: send
  finalized         -> complete: await report
  reported desync   -> failed: exchange failures, restore, release, raise
wrapped
  outputs made      -> expected
  output reached    -> reached: queue end
  grad arrived      -> open: save, open, arm
  backward ended    -> complete: await report
  reported repair   -> ended: write, release
gradients of inputs
  outputs made      -> expected
  inputs reached    -> touched: queue end
  backward ended    -> expected: release
  forward began     -> idle
no gradient on this rank
  output reached    -> reached: queue end
  backward ended    -> complete: save, open, arm, await report
  reported change   -> complete: open, arm, await report
  reported failure  -> failed: exchange failures, restore, release, raise
aborted before a gradient
  output reached    -> reached: queue end
  pass aborted      -> owed
  due               -> failing: open empty, fail, await report
  reported failure  -> failed: exchange failures, release, raise
  voted             -> ended
aborted and reported
  grad arrived      -> open: queue end, save, open, arm
  pass aborted late -> aborted: forget
  raised            -> failing: fail, await report
  transport failed  -> broken: abandon, release, raise
  opened            -> open
distributed autograd
  output reached    -> reached: queue end
  context grad arrived -> deferred: save
  left unsent       -> suspended in context
  finalized         -> complete: open in context, await report
finalized within backward
  output reached    -> reached: queue end
  finalized         -> reached: raise nothing to finalize
  grad arrived      -> open: save, open, arm
  finalized         -> complete: forget end, await report
suspended
  output reached    -> reached: queue end
  left unsent       -> suspended: save, open, arm
  output reached    -> suspended: raise unfinalized
  raised            -> dropping: fail, await report
  reported failure  -> failed: exchange failures, restore, release, raise
gradients left out of a step
  output reached    -> reached: queue end
  left open         -> suspended: save, open, arm, send
  left out          -> dropping: await report
  reported regular  -> ended: restore, release
interrupted
  output reached    -> reached: queue end
  grad arrived      -> open: save, open, arm
  interrupted       -> broken: forget end, abandon, restore, release
closed while its report is awaited
  output reached    -> reached: queue end
  grad arrived      -> open: save, open, arm
  backward ended    -> complete: await report
  closed            -> complete: abandon
  transport failed  -> broken: abandon, restore, release, raise
closed after an aborted pass
  output reached    -> reached: queue end
  pass aborted      -> owed
  closed            -> broken: abandon, release
aborted, as another thread learns just before a forward pass
  output reached    -> reached: queue end
  due               -> reached
  pass aborted      -> owed
  forward began     -> owed: complete owed
  due               -> failing: open empty, fail, await report
  reported failure  -> failed: exchange failures, release, raise
  forward began     -> idle
out of inputs
  joined            -> joining: take part, await report
  reported regular  -> ended: release
  closed            -> broken: abandon
"""


def test_lives() -> None:
    """Event by event, with the state after it and the actions."""
    life = Life()
    for line in LIVES.strip().splitlines():
        event, _, expected = line.strip().partition("->")
        if not expected:
            life = Life()
            continue
        life, actions = advance(life, cast(Event, event.strip()))
        found = ": ".join([life.name, ", ".join(actions)]) if actions else life.name
        assert found == expected.strip(), line


def expects(*events: Event) -> bool:
    """True if gradients belong to a step after these events that come without an output."""
    life = Life()
    for event in events:
        life, _ = advance(life, event)
    assert life.awaits_gradients == (life.expects or life.name in RUNNING or life.name in OWING)
    return life.expects


def test_gradients_beside_outputs_belong_to_the_first_step_of_a_forward_pass() -> None:
    hidden: list[Event] = ["outputs made", "grad arrived"]  # the output hides its tensors
    visible: list[Event] = ["outputs made", "output reached", "grad arrived"]
    step: list[Event] = ["backward ended", "reported regular"]
    assert expects(*hidden)
    assert expects(*hidden, *step)
    assert not expects(*hidden, "output reached", *step)
    assert not expects(*hidden, *step, "forward began")
    assert not expects(*visible, *step)
    assert not expects(*visible, "left open", "finalized", "reported failure")
    assert expects(*visible, *step, "outputs made")
    assert expects(*visible, "pass aborted")
    assert expects(*visible, "pass aborted", "due", "reported failure")
    assert not expects(*visible, "pass aborted", "raised", "reported failure")
    assert not expects(*hidden, "left open", "left out", "reported regular")
    assert expects(*hidden, "left open", "forward began")  # which is refused
    assert expects("outputs made", "inputs reached", "backward ended")
    assert expects("outputs made", "inputs reached", "forward began", "pass aborted")
    assert not expects("output reached", "grad arrived", *step)


def test_outputs_are_taken_unseen_where_nothing_is_decided() -> None:
    for name in get_args(State):
        is_free = Life(name).takes_outputs
        assert is_free == (name in BETWEEN or name in RUNNING)
        if is_free and name != "armed":
            assert advance(Life(name), "output reached")[1] in ((), ("queue end",))


def test_failures_that_threads_of_devices_note_leave_the_state_of_a_step() -> None:
    """They are noted without a lock, while backward runs."""
    for name in ("open", "armed"):
        assert advance(Life(name), "failed") == (Life(name), ("fail",))


# Ranks that meet


class Rank:
    """A rank that runs steps: generators yield where it awaits a report, and are sent that."""

    def __init__(self, choices: Random) -> None:
        self.world = World()
        self._choices = choices

    def note(self, event: Event, *, may_fail: bool = True) -> Iterator[None]:
        """An event, and reports that are awaited before it or because of it."""
        while True:
            fault: Event | None = "failed" if may_fail and not self._choices.randrange(8) else None
            before = self.world
            self.world = after(before, event, fault)
            came_late = before.life.name in OWING and event not in ("due", "raised")
            while self.world.awaits:
                yield
            if not came_late:
                return

    def step(self, kind: str) -> Iterator[None]:
        """Forward and backward passes of a step, some of which fail or are aborted."""
        choices = self._choices
        yield from self.note("forward began")
        yield from self.note("outputs made")
        if kind == "in step" and not choices.randrange(4):
            yield from self.note("raised")
            return
        yield from self.note("output reached")
        grad = GRADS[kind == "context"]
        inside: list[Event] = ["due", "output reached", "outputs made", "forward began", grad]
        while not choices.randrange(2):
            yield from self.note(choices.choice(inside))
        if not choices.randrange(4):
            yield from self.note(choices.choice(ABORTS))
            if kind == "in step":
                yield from self.note("raised")
            return
        if kind != "manual":
            yield from self.note("backward ended")
            return
        yield from self.note(choices.choice(["left open", "left unsent"]))
        while not choices.randrange(3):
            yield from self.note(
                choices.choice(["due", "voted", "forward began", "output reached"])
            )
        yield from self.note(choices.choice(["finalized", "left out", "raised"]))

    def run(self, kinds: list[str], *, joins: bool) -> Iterator[None]:
        """Steps of some kinds; the last ones without inputs, if `joins`."""
        left = len(kinds) - (joins and not self._choices.randrange(2))
        for number, kind in enumerate(kinds):
            if number < left:
                yield from self.step(kind)
            else:
                yield from self.note("joined")
        yield from self.note("due")  # as a forward pass, a vote or a block would be


def report(ranks: list[Rank], choices: Random) -> Event:
    """The report of a step that all ranks await; the same on all of them."""
    if not choices.randrange(16):
        return choices.choice(["transport failed", "reported desync"])
    if any(rank.world.has_failed for rank in ranks):
        return "reported failure"
    if all(rank.world.life.name == "complete" for rank in ranks) and not choices.randrange(8):
        return "reported change"
    return choices.choice(RESULTS)


def meet(choices: Random) -> None:
    """Run ranks that differ in what fails, arrives and is aborted: they await equally many reports,
    and issue the same collectives after each."""
    kinds = choices.choices(["plain", "manual", "in step", "context"], k=choices.randrange(1, 4))
    joins = not choices.randrange(4)
    ranks = [Rank(choices) for _ in range(choices.randrange(2, 4))]
    runs = [rank.run(kinds, joins=joins) for rank in ranks]
    steps = 0
    while True:
        awaiting = [next(run, "ended") is None for run in runs]
        assert len({*awaiting}) == 1, [rank.world.life for rank in ranks]
        if not awaiting[0]:
            break
        event = report(ranks, choices)
        issued = []
        for rank in ranks:
            actions = advance(rank.world.life, event)[1]
            issued.append([a for a in actions if a in ("await report", "exchange failures")])
            rank.world = after(rank.world, event)
        assert issued == issued[:1] * len(ranks), event
        steps += event != "reported change"
    assert steps == len(kinds)
    for rank in ranks:
        assert rank.world.life.name in BETWEEN


@given(st.integers(0, 2**32))
@examples(400)
def test_no_rank_waits_for_a_step_that_another_does_not_take(seed: int) -> None:
    choices = Random(seed)
    for _ in range(50):  # orders
        meet(choices)
