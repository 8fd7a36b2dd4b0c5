"""The life of a step: the events that begin it, and what each event leads to until it has ended.

`advance` is a table. A functional step goes through a part of it:

    idle -> open -> armed -> complete -> [unread ->] ended | failed | broken

A wrapped module goes around, because autograd begins its steps:

    expected -> reached -> open -> complete -> ended | failed | broken -> expected ...

A `Step` (`runtime/step.py`) has a life of its own, whose actions are its callers' code. A wrapped
module (`ddp/steps.py`) has another around the steps that it opens, alone with the states of passes,
and executes the actions as they are returned.

An aborted backward pass leaves an `aborted` step, or an `owed` one that was not opened. Other ranks
take that step, so this rank completes it with zeros before it communicates again. Collectives
follow from "await report" and from the report alone, never from what arrived on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

from fddp.errors import InternalError

State = Literal[
    # Between steps.
    "idle",
    "expected",  # A forward pass gave outputs.
    "ended",  # The last step gave results.
    "failed",  # The last step failed on all ranks, in good order.
    "broken",  # The last step lost its transport, or the communicator is closed.
    # A backward pass runs, whose end will be announced.
    "touched",  # It computes gradients of given inputs. It takes a step if one is a parameter.
    "reached",  # It takes a step, even if it reaches no parameter.
    "deferred",  # Gradients arrive in a context of distributed autograd. The end opens the step.
    "unopened",  # The step could not be opened. The end raises the error.
    "open",  # The step takes gradients. Also of a functional step.
    "armed",  # One synchronisation takes the gradients of a graph.
    # The pass has ended, and `finalize` will close the step.
    "suspended",
    "suspended in context",  # As "deferred".
    # The pass was aborted, and other ranks wait for its step.
    "aborted",  # It is open.
    "owed",  # It is not open.
    # The report of all ranks is awaited.
    "complete",  # Results become gradients.
    "dropping",  # Results are dropped.
    "failing",  # This rank reports a failure. Its gradients are already those from before.
    "joining",  # This rank is out of inputs. It contributes nothing, and takes no result.
    "unread",  # Results were taken before the report is there.
]

Event = Literal[
    # Of a functional step.
    "opened",
    "armed",
    # Of forward and backward passes.
    "forward began",
    "outputs made",
    "output reached",
    "inputs reached",  # An output was reached by a pass for gradients of given inputs.
    "grad arrived",
    "context grad arrived",  # In a context of distributed autograd.
    "backward ended",
    "left open",  # Backward ended, and `finalize` will close the step.
    "left unsent",  # As "left open", where the caller may still fail the step.
    "pass aborted",
    "pass aborted late",  # This thread learns of it after the caller, who may change gradients.
    # Of callers.
    "finalized",
    "left out",  # `finalize` found gradients that came too late for the step.
    "raised",  # An exception left the block of the step.
    "joined",  # This rank is out of inputs, and other ranks take a step.
    "due",  # Other ranks wait for what is owed.
    "voted",
    "closed",
    # Of the running step.
    "open failed",
    "failed",
    "write failed",
    "interrupted",  # An action did not end. Ranks may no longer agree on the next collective.
    "transport failed",
    "results taken",  # The report is read later, before the next collective.
    "reported regular",
    "reported repair",
    "reported change",  # The parameters have changed on all ranks.
    "reported failure",
    "reported desync",
]

Action = Literal[
    "queue end",  # Queue a callback for the end of the backward pass.
    "forget end",
    "save",  # Record the gradients from before, until "write", "restore", "forget" or "release".
    "open",
    "open in context",  # Open a step of the gradients in a context of distributed autograd.
    "open empty",  # Open a step without contributions.
    "take part",  # Open a step of a rank that is out of inputs.
    "arm",  # Pack and send gradients as they arrive.
    "fail",  # Contribute zeros, and report the error in the control word.
    "send",  # Send what need not wait for other ranks.
    "await report",  # Send the rest, and wait for the sum of the control words.
    "exchange failures",
    "abandon",  # Give up the transport. Other ranks learn of it.
    "write",
    "restore",  # Restore the gradients from before.
    "forget",  # Forget the gradients from before, and leave those of this rank.
    "release",  # Drop the state of the step.
    "raise",
    "raise unfinalized",  # The caller has to finalize the step first.
    "complete owed",  # Complete the step that other ranks wait for. Then the event comes again.
    "raise nothing to finalize",
]

Actions: TypeAlias = tuple[Action, ...]
_Row: TypeAlias = tuple[State, Actions] | None  # None: the event has no effect
_Rows: TypeAlias = dict[Event, _Row]

BETWEEN: frozenset[State] = frozenset({"idle", "expected", "ended", "failed", "broken"})
"""States between steps. Nothing is owed to other ranks."""

RUNNING: frozenset[State] = frozenset(
    {"touched", "reached", "deferred", "unopened", "open", "armed"}
)
"""States in which gradients may arrive."""

SUSPENDED: frozenset[State] = frozenset({"suspended", "suspended in context"})
"""States of a step that waits for `finalize`."""

OWING: frozenset[State] = frozenset({"aborted", "owed"})
"""States after an aborted pass. Other ranks wait for the step."""


_STARTS: tuple[Event, ...] = (
    *("forward began", "output reached", "inputs reached", "joined"),
    *("grad arrived", "context grad arrived"),
)


class Life(NamedTuple):
    """State of the current step, or between steps.

    Attributes:
        name: name of the state.
        expects: True if a gradient belongs to a step that comes without an output being reached.
        reached: True if the running pass has reached an output.
    """

    name: State = "idle"
    expects: bool = False
    reached: bool = False

    @property
    def awaits_gradients(self) -> bool:
        """True if the first gradient of a pass is an event."""
        return self.expects or self.name in RUNNING or self.name in OWING

    @property
    def takes_outputs(self) -> bool:
        """True if an output that is reached leads to nothing but "queue end", at most."""
        return self.name in BETWEEN or self.name in RUNNING


def _between(name: State) -> _Rows:
    return {
        "opened": ("open", ()),
        "forward began": ("idle", ()),
        "outputs made": ("expected", ()),
        "output reached": ("reached", ("queue end",)),
        "inputs reached": ("touched", ("queue end",)),
        "grad arrived": ("open", ("queue end", "save", "open", "arm")),
        "context grad arrived": ("deferred", ("queue end", "save")),
        "raised": ("failing", ("open empty", "fail", "await report")),
        "joined": ("joining", ("take part", "await report")),
        "finalized": (name, ("raise nothing to finalize",)),
        "due": None,
        "voted": ("ended", ()) if name == "failed" else None,
        "write failed": (name, ("release", "raise")),
        "closed": ("broken", ("abandon",)),
    }


def _running(name: State) -> _Rows:
    return {
        "output reached": (name, ()),
        "inputs reached": (name, ()),
        # Threads of several devices may bring a first gradient.
        "grad arrived": None,
        "context grad arrived": None,
        # A checkpoint runs forward again, within the pass.
        "forward began": None,
        "outputs made": (name, ()),
        "due": None,
        "voted": None,
        "raised": None,  # in another thread; the end of the pass completes the step
        "finalized": (name, ("raise nothing to finalize",)),
        "closed": (name, ("abandon",)),
    }


def _suspended(name: State, opens: Actions, opens_empty: Actions) -> _Rows:
    return {
        "finalized": ("complete", (*opens, "await report")),
        "left out": ("dropping", ("await report",)),
        "raised": ("dropping", (*opens_empty, "fail", "await report")),
        "open failed": ("idle", ("restore", "release", "raise")),
        "failed": (name, ("fail",)),
        # The step has to be closed first.
        "forward began": (name, ("raise unfinalized",)),
        "output reached": (name, ("raise unfinalized",)),
        "inputs reached": (name, ("raise unfinalized",)),
        "joined": (name, ("raise unfinalized",)),
        "outputs made": (name, ()),
        "due": None,
        "voted": None,
        "closed": (name, ("abandon",)),
    }


def _owing(name: State, opens: Actions) -> _Rows:
    failing: _Row = ("failing", (*opens, "fail", "await report"))
    return {
        "due": failing,
        "raised": failing,
        # A thread of a device may free the aborted pass at any time, also right after "due".
        **dict.fromkeys(_STARTS, (name, ("complete owed",))),
        "outputs made": (name, ()),
        "voted": None,
        "finalized": (name, ("raise nothing to finalize",)),
        "closed": ("broken", ("abandon", "release")),
    }


def _awaiting(name: State, gives: Actions, restores: Actions) -> _Rows:
    ended: _Row = ("ended", (*gives, "release"))
    failed: _Row = ("failed", ("exchange failures", *restores, "release", "raise"))
    return {
        **({} if name == "failing" else {"reported regular": ended, "reported repair": ended}),
        "reported failure": failed,
        "reported desync": failed,
        "transport failed": ("broken", ("abandon", *restores, "release", "raise")),
        "failed": (name, ("fail",)),
        "closed": (name, ("abandon",)),  # by a signal handler, or a communication hook
        # A communication hook of the user may call the module.
        **dict.fromkeys(("forward began", "outputs made", "due", "voted"), None),
    }


def _interrupted(name: State) -> _Row:
    if name in BETWEEN:
        return "broken", ("abandon",)
    ends: Actions = ("forget end",) if name in RUNNING else ()
    restores: Actions = ("restore",) if name in _SAVED else ()
    return "broken", (*ends, "abandon", *restores, "release")


_SAVED: frozenset[State] = SUSPENDED | {"deferred", "unopened", "open", "complete", "dropping"}
_EXPECTS: Mapping[Event, bool] = {
    "outputs made": True,
    "forward began": False,
    "raised": False,
    "left out": False,
}
_ROWS: Mapping[State, _Rows] = {
    **{name: _between(name) for name in BETWEEN},
    "touched": {
        **_running("touched"),
        "grad arrived": ("open", ("save", "open", "arm")),
        "context grad arrived": ("deferred", ("save",)),
        **dict.fromkeys(("pass aborted", "pass aborted late"), ("idle", ())),
        **dict.fromkeys(("backward ended", "left open", "left unsent"), ("idle", ("release",))),
    },
    "reached": {
        **_running("reached"),
        "grad arrived": ("open", ("save", "open", "arm")),
        "context grad arrived": ("deferred", ("save",)),
        **dict.fromkeys(("pass aborted", "pass aborted late"), ("owed", ())),
        # No gradient came, and the other ranks take the step.
        "backward ended": ("complete", ("save", "open", "arm", "await report")),
        "left open": ("suspended", ("save", "open", "arm", "send")),
        "left unsent": ("suspended", ("save", "open", "arm")),
    },
    "deferred": {
        **_running("deferred"),
        "pass aborted": ("owed", ("restore",)),
        "pass aborted late": ("owed", ("forget",)),
        "backward ended": ("complete", ("open in context", "await report")),
        **dict.fromkeys(("left open", "left unsent"), ("suspended in context", ())),
    },
    "unopened": {
        **_running("unopened"),
        "pass aborted": ("owed", ("restore",)),
        "pass aborted late": ("owed", ("forget",)),
        # Gradients are those of this rank.
        **dict.fromkeys(
            ("backward ended", "left open", "left unsent"), ("idle", ("release", "raise"))
        ),
    },
    "open": {
        **_running("open"),
        "armed": ("armed", ()),
        "failed": ("open", ("fail",)),
        "open failed": ("unopened", ()),
        "pass aborted": ("aborted", ("restore",)),
        "pass aborted late": ("aborted", ("forget",)),
        "backward ended": ("complete", ("await report",)),
        "left open": ("suspended", ("send",)),
        "left unsent": ("suspended", ()),
        # A hook within backward may close the step, once all gradients are there.
        "finalized": ("complete", ("forget end", "await report")),
    },
    # A pass that is aborted has failed: the call that runs it ends the step itself.
    "armed": {
        "failed": ("armed", ("fail",)),
        "backward ended": ("complete", ("await report",)),
        "closed": ("armed", ("abandon",)),
    },
    "suspended": _suspended("suspended", (), ()),
    "suspended in context": _suspended(
        "suspended in context", ("open in context",), ("open empty",)
    ),
    "aborted": _owing("aborted", ()),
    "owed": _owing("owed", ("open empty",)),
    "complete": {
        **_awaiting("complete", ("write",), ("restore",)),
        "open failed": ("idle", ("restore", "release", "raise")),
        # All ranks have made a new plan for parameters that changed.
        "reported change": ("complete", ("open", "arm", "await report")),
        "results taken": ("unread", ("write", "release")),
    },
    "unread": {
        "reported regular": ("ended", ()),
        **dict.fromkeys(
            ("reported failure", "reported desync"), ("failed", ("exchange failures", "raise"))
        ),
        "transport failed": ("broken", ("abandon", "raise")),
        "closed": ("broken", ("abandon",)),
    },
    "dropping": {
        **_awaiting("dropping", ("restore",), ("restore",)),
        "open failed": ("idle", ("restore", "release", "raise")),
    },
    "failing": {**_awaiting("failing", (), ()), "open failed": ("idle", ("release", "raise"))},
    "joining": {**_awaiting("joining", (), ()), "open failed": ("idle", ("release", "raise"))},
}
_TABLE: Mapping[State, _Rows] = {
    name: {**rows, "interrupted": _interrupted(name)} for name, rows in _ROWS.items()
}


@cache  # lives, events and rows are few
def advance(life: Life, event: Event) -> tuple[Life, Actions]:
    """Return the life after an event, and the actions that follow from it, in order.

    Raises:
        InternalError: the event cannot come in this state.

    Example:
        >>> life, actions = advance(Life("expected", expects=True), "output reached")
        >>> life.name, actions
        ('reached', ('queue end',))
        >>> advance(life, "grad arrived")[1]
        ('save', 'open', 'arm')
    """
    if event not in _TABLE[life.name]:
        raise InternalError(f"the event {event!r} came in the state {life.name!r} of a step")
    row = _TABLE[life.name][event]
    if row is None:
        return life, ()
    name, actions = row
    if "raise unfinalized" in actions or "complete owed" in actions:
        return life, actions  # the event has not come yet
    expects = _EXPECTS.get(event, life.expects)
    reached = life.reached or event in ("output reached", "inputs reached")
    if name in BETWEEN and life.name not in BETWEEN and life.name != "touched":
        # Outputs take one step. Later gradients belong to none, unless an output is reached again.
        expects = expects and not reached
    if name in BETWEEN or name in OWING:
        reached = False
    if name == "idle" and expects:
        name = "expected"
    return Life(name, expects, reached), actions
