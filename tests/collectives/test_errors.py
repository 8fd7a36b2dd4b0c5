"""Bad input to the operators: named errors on every rank, and ranks that stay usable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import fddp
from fddp.collectives import handshake
from tests.support.endings import Ending, ending
from tests.support.groups import rank_of
from tests.support.on_ranks import on_threads
from tests.support.polling import HANG_S
from tests.support.ranks import Launch

ONE = torch.ones(2)


def two_gradients(only_one: bool) -> Callable[[fddp.Communicator], Any]:
    """A branch of backward that one rank may not take: two means of one shape."""

    def act(ranks: fddp.Communicator) -> Any:
        x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        a, b = fddp.pmean(x, ranks), fddp.pmean(y, ranks)
        (a if only_one else a + b).sum().backward()
        return x.grad

    return act


def one_of_two(ranks: fddp.Communicator, which: int) -> Any:
    """Two trees of one shape, of which the loss uses another on each rank."""

    def loss(pair: tuple[Tensor, Tensor]) -> Tensor:
        both = fddp.sync_on_backward(pair[0], ranks), fddp.sync_on_backward(pair[1], ranks)
        return both[which].sum()

    return grad(loss)((ONE, ONE))


#: call of rank 0, call of the others, and the text of their errors
DIFFERENT: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "operators": (
        lambda ranks: fddp.psum(ONE, ranks),
        lambda ranks: fddp.pmean(ONE, ranks),
        "rank 0: psum of 1 leaf ('').*rank 1: pmean of 1 leaf ('').*the operator is psum on rank 0 "
        "and pmean on rank 1",
    ),
    "shapes": (
        lambda ranks: fddp.psum({"w": ONE}, ranks),
        lambda ranks: fddp.psum({"w": ONE.view(2, 1)}, ranks),
        "rank 0 has leaf 'w' of shape (2,), float32 on cpu where rank 1 has leaf 'w' of shape "
        "(2, 1), float32 on cpu",
    ),
    "trees": (
        lambda ranks: fddp.psum({"a": ONE, "b": ONE}, ranks),
        lambda ranks: fddp.psum({"a": ONE, "b": None}, ranks),
        "only rank 0 has leaf 'b' of shape (2,), float32 on cpu",
    ),
    "roots": (
        lambda ranks: fddp.broadcast_from(ONE, 0, ranks),
        lambda ranks: fddp.broadcast_from(ONE, 1, ranks),
        "the root is 0 on rank 0 and 1 on rank 1",
    ),
    "tiles": (
        lambda ranks: fddp.all_gather(ONE, ranks),
        lambda ranks: fddp.all_gather(ONE, ranks, tiled=True),
        "the choice of tiled is False on rank 0 and True on rank 1",
    ),
    "plans": (
        lambda ranks: fddp.psum([ONE, ONE], ranks),
        lambda ranks: fddp.psum(
            [ONE, ONE], ranks, plan=fddp.plan_buckets([ONE, ONE], bucket_cap_mb=1e-5)
        ),
        "the leaves are alike, but not the buckets",
    ),
    "batches": (
        lambda ranks: vmap(lambda x: fddp.psum(x, ranks))(ONE.expand(3, 2)),
        lambda ranks: fddp.psum(ONE, ranks),
        "rank 0 has the tree itself of shape (3, 2), float32 on cpu where rank 1 has the tree "
        "itself of shape (2,)",
    ),
    "directions": (
        lambda ranks: grad(lambda x: fddp.psum(x, ranks).sum())(ONE),
        lambda ranks: [fddp.psum(ONE, ranks), fddp.psum(ONE, ranks)],
        "rank 0: backward of psum of 1 leaf.*rank 1: psum of 1 leaf.*differentiate it in different",
    ),
    "calls that only backward meets": (
        lambda ranks: one_of_two(ranks, 0),
        lambda ranks: one_of_two(ranks, 1),
        "rank 0: backward of pmean of 1 leaf.*rank 0 differentiates another call of it than rank 1",
    ),
    "calls": (
        two_gradients(only_one=True),
        two_gradients(only_one=False),
        "rank 0 differentiates another call of it than rank 1",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_differ(case: str) -> None:
    check_difference(case, fddp.loopback(2, differ, case))


def check_difference(case: str, endings: list[tuple[Ending, float]]) -> None:
    *_, outcome = DIFFERENT[case]
    for rank, (found, after) in enumerate(endings):
        assert found.kinds[0] == "DesyncError", found
        for part in outcome.split(".*"):
            assert part in found.text, (part, found.text)
        for line in ("0", "1"):
            assert f"rank {line}: " in found.text
        assert found.text.count(f"{__file__}:") == 2
        assert after == 2, rank


def differ(group: Any, case: str) -> tuple[Ending, float]:
    first, second, _ = DIFFERENT[case]
    rank = rank_of(group)
    with fddp.Communicator(group) as ranks:
        found = ending(lambda: (first if rank == 0 else second)(ranks))
        # The one with more calls gets the error at the other's next call.
        return found, float(fddp.psum(torch.tensor(1.0), ranks))


def test_reports_are_not_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is allocated for them, so that a length that makes no sense is refused before."""
    monkeypatch.setattr(handshake, "_MAX_BYTES", 10)
    for found, after in fddp.loopback(2, differ, "operators"):
        assert found.kinds[0] == "DesyncError"
        assert "bytes, more than 10; run the same version of fddp on every rank" in found.text
        assert after == 2


#: what rank 1 asks for while rank 0 sums, and its error; the communicator stays usable
WRONG: dict[str, tuple[Callable[..., Any], str, str]] = {
    "mean of integers": (
        lambda ranks: fddp.pmean({"n": torch.tensor(1)}, ranks),
        "TypeError",
        "pmean: leaf 'n' is of torch.int64, which can't represent a mean; use psum, or "
        "convert it to a floating dtype",
    ),
    "sum of bools": (
        lambda ranks: fddp.psum(torch.tensor(True), ranks),
        "TypeError",
        "psum: the tree itself is of torch.bool, which can't be summed; convert it to one of",
    ),
    "no tensor": (
        lambda ranks: fddp.psum({"w": "text"}, ranks),
        "TypeError",
        "psum: leaf 'w' is str; it takes dense tensors and None",
    ),
    "sparse": (
        lambda ranks: fddp.pmean({"e": torch.eye(2).to_sparse()}, ranks),
        "TypeError",
        "pmean: leaf 'e' is of layout torch.sparse_coo; it takes dense tensors and None: pass its "
        "to_dense(), or average sparse gradients by a GradSync (sparse=)",
    ),
    "largest complex": (
        lambda ranks: fddp.pmax(torch.ones(1, dtype=torch.complex64), ranks),
        "TypeError",
        "pmax: the tree itself is of torch.complex64, which has no order",
    ),
    "largest of a kind without": (
        lambda ranks: fddp.pmax({"n": torch.ones(1, dtype=torch.uint16)}, ranks),
        "TypeError",
        "pmax: leaf 'n' is of torch.uint16, for which torch.amax is not implemented; convert it to",
    ),
    "root": (
        lambda ranks: fddp.broadcast_from(ONE, 2, ranks),
        "ValueError",
        "broadcast_from: root=2 is out of range; 2 ranks meet, numbered from 0",
    ),
    "root below zero": (
        lambda ranks: fddp.broadcast_from(ONE, -1, ranks),
        "ValueError",
        "broadcast_from: root=-1 is out of range; 2 ranks meet, numbered from 0",
    ),
    "root that is a bool": (
        lambda ranks: fddp.broadcast_from(ONE, True, ranks),
        "TypeError",
        "broadcast_from: root must be an int, got True",
    ),
    "root of another kind": (
        lambda ranks: fddp.broadcast_from(ONE, "0", ranks),
        "TypeError",
        "broadcast_from: root must be an int, got '0'",
    ),
    "axis of a tensor": (
        lambda ranks: fddp.psum(ONE, ranks, axis=0),
        "TypeError",
        "psum: axis must be a name of an axis of the mesh, or a tuple of names, got 0; axes of "
        "tensors and batches of vmap are not axes of ranks",
    ),
    "unknown axis": (
        lambda ranks: fddp.psum(ONE, ranks, axis="rows"),
        "ValueError",
        "psum: axis='rows' must name distinct axes of the mesh, which is missing; pass mesh=",
    ),
    "batched root": (
        lambda ranks: vmap(lambda root: fddp.broadcast_from(ONE, root, ranks))(torch.arange(2)),
        "TypeError",
        "broadcast_from: root must be an int that all ranks know, got a tensor; a root can't be "
        "batched by vmap",
    ),
    "no axis of ranks": (
        lambda ranks: fddp.reduce_scatter({"w": torch.ones(3)}, ranks),
        "ValueError",
        "reduce_scatter: leaf 'w' of shape (3,) needs a leading axis of 2, one slice for each rank",
    ),
    "indivisible": (
        lambda ranks: fddp.reduce_scatter({"w": torch.ones(3)}, ranks, tiled=True),
        "ValueError",
        "reduce_scatter: leaf 'w' of shape (3,) can't be cut into 2 equal parts",
    ),
    "a row for some ranks": (
        lambda ranks: fddp.all_to_all({"w": torch.ones(3)}, ranks),
        "ValueError",
        "all_to_all: leaf 'w' of shape (3,) needs a leading axis of 2, one slice for each rank",
    ),
    "tiles for some ranks": (
        lambda ranks: fddp.all_to_all({"w": torch.ones(3)}, ranks, tiled=True),
        "ValueError",
        "all_to_all: leaf 'w' of shape (3,) can't be cut into 2 equal parts",
    ),
    "tiled scalar": (
        lambda ranks: fddp.all_gather(torch.tensor(1.0), ranks, tiled=True),
        "ValueError",
        "all_gather: the tree itself of shape () can't be cut",
    ),
    "plan of another tree": (
        lambda ranks: fddp.psum({"w": ONE}, ranks, plan=fddp.plan_buckets({"w": torch.ones(3)})),
        "PlanMismatchError",
        "the plan has 'w', float32 of (3,), where the tree has 'w', float32 of (2,); make a plan",
    ),
    "plan of a smaller tree": (
        lambda ranks: fddp.psum({"v": ONE, "w": ONE}, ranks, plan=fddp.plan_buckets({"v": ONE})),
        "PlanMismatchError",
        "the plan is for 1 leaf, and the tree has more",
    ),
    "no plan": (
        lambda ranks: fddp.psum(ONE, ranks, plan=3),
        "TypeError",
        "psum: plan must be a BucketPlan, got int",
    ),
    "subclass": (
        lambda ranks: fddp.psum(Odd(ONE), ranks),
        "TypeError",
        "Odd, which dispatches by itself; pass plain tensors (of a DTensor, its to_local();",
    ),
    "former vmap": (
        lambda ranks: former_vmap(ranks),
        "TypeError",
        "is a batch of torch's former vmap (is_grads_batched=, vectorize=); use torch.func.vmap",
    ),
}


class Odd(Tensor):
    """A tensor that dispatches by itself."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Odd:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


def former_vmap(ranks: fddp.Communicator) -> Any:
    x = ONE.clone().requires_grad_()
    y = fddp.psum(x, ranks)
    return torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)


@pytest.mark.parametrize("case", WRONG)
def test_mistake_on_one_rank_is_raised_on_all(case: str) -> None:
    check_mistake(case, fddp.loopback(2, go_wrong, case))


@pytest.mark.parametrize("launch", ["c10d", "shm"], indirect=True)
def test_differences_and_mistakes_on_processes(launch: Launch) -> None:
    """All cases, one after the other, in the same processes."""
    first, second = launch(2, differ_and_go_wrong)
    for case in DIFFERENT:
        check_difference(case, [first[0][case], second[0][case]])
    for case in WRONG:
        check_mistake(case, [first[1][case], second[1][case]])


def differ_and_go_wrong(group: Any) -> Any:
    differing = {case: differ(group, case) for case in DIFFERENT}
    return differing, {case: go_wrong(group, case) for case in WRONG}


def check_mistake(case: str, endings: list[tuple[Ending, float]]) -> None:
    (peer, first), (own, second) = endings
    _, kind, text = WRONG[case]
    assert own.kinds[0] == kind, own
    assert text in own.text
    assert peer.kinds[0] == "PeerError", peer
    assert f"rank 1 can't take part: {kind}: " in peer.text
    assert text in peer.text
    assert peer.text.count(f"{__file__}:") == 2  # where either was called
    assert (first, second) == (2, 2)


def go_wrong(group: Any, case: str) -> tuple[Ending, float]:
    with fddp.Communicator(group) as ranks:
        if case == "former vmap" and ranks.rank == 0:
            fddp.psum(ONE, ranks)
        act = WRONG[case][0] if ranks.rank else lambda ranks: fddp.psum(ONE, ranks)
        found = ending(lambda: act(ranks))
        return found, float(fddp.psum(torch.tensor(1.0), ranks))


@on_threads(2)
def test_mistake_on_all_ranks_is_raised_on_all(group: Any) -> None:
    with fddp.Communicator(group) as ranks:
        assert ending(lambda: fddp.pmean(torch.tensor(1), ranks)).kinds[0] == "TypeError"
        assert float(fddp.psum(torch.tensor(1.0), ranks)) == 2


#: invalid arguments that select the ranks, so that no other rank can be informed
NOBODY: dict[str, tuple[Callable[..., Any], str, str]] = {
    "batched group": (
        lambda group: vmap(lambda g: fddp.psum(ONE, g))(torch.arange(2)),
        "TypeError",
        f"psum, called at {__file__}:.*group must be a process group, a DeviceMesh of one "
        "dimension, a Communicator or the group of fddp.loopback, got a Tensor; a group can't be "
        "batched by vmap",
    ),
    "unknown axis": (
        lambda group: fddp.psum(ONE, group, mesh=fddp.Topology(row=1, column=2), axis="rows"),
        "ValueError",
        "axis='rows' must name distinct axes of the mesh, which has ('row', 'column')",
    ),
    "axis twice": (
        lambda group: fddp.psum(ONE, group, mesh=fddp.Topology(row=2), axis=("row", "row")),
        "ValueError",
        "axis=('row', 'row') must name distinct axes",
    ),
    "mesh of another size": (
        lambda group: fddp.psum(ONE, group, mesh=fddp.Topology(row=3)),
        "ValueError",
        "Topology(row=3) has 3 ranks and the transport 2",
    ),
    "mesh of another communicator": (
        lambda group: fddp.psum(ONE, fddp.Communicator(group), mesh=fddp.Topology(row=2)),
        "ValueError",
        "with a communicator whose mesh is None",
    ),
    "cap": (
        lambda group: fddp.Communicator(group, bucket_cap_mb=0),
        "ValueError",
        "bucket_cap_mb must be a number of MiB above 0, got 0",
    ),
}


@pytest.mark.parametrize("case", NOBODY)
@on_threads(2)
def test_invalid_rank_arguments_are_refused(group: Any, case: str) -> None:
    act, kind, text = NOBODY[case]
    found = ending(lambda: act(group))
    assert found.kinds[0] == kind, found
    for part in text.split(".*"):
        assert part in found.text


@on_threads(2)
def test_caps_that_differ(group: Any) -> None:
    cap_mb = 1 if rank_of(group) else 25
    found = ending(lambda: fddp.Communicator(group, bucket_cap_mb=cap_mb))
    assert found.kinds[0] == "PlanMismatchError"
    assert (
        "the bucket size of a communicator in bytes is 26214400 on rank 0 and 1048576 on rank "
        "1; pass the same bucket_cap_mb on every rank" in found.text
    )


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "cap": ({"bucket_cap_mb": "large"}, "bucket_cap_mb must be a number of MiB above 0"),
    "transport": ({"transport": "foo"}, "transport='foo' does not fit this group; pass 'auto'"),
    "timeout": ({"timeout_s": -1}, "timeout_s must be above 0 and at most"),
}


@pytest.mark.parametrize("case", OPTIONS)
@on_threads(2)
def test_a_communicator_that_one_rank_can_not_make(group: Any, case: str) -> None:
    options, text = OPTIONS[case]
    found = ending(lambda: fddp.Communicator(group, **(options if rank_of(group) else {})))
    assert found.kinds[0] == ("ValueError" if rank_of(group) else "PlanMismatchError"), found
    assert text in found.text
    assert rank_of(group) or "rank 1 can't make a communicator: ValueError: " in found.text
    assert float(fddp.psum(torch.tensor(1.0), group)) == 2


@on_threads(2)
def test_another_default_device(group: Any) -> None:
    one = torch.tensor(1.0)
    with torch.device("meta"):
        found = ending(lambda: fddp.pmean(3 if group.rank else one, group))
        assert found.kinds[0] in ("PeerError", "TypeError")
        assert float(fddp.psum(one, group)) == 2.0


@on_threads(2)
def test_a_closed_communicator(group: Any) -> None:
    ranks = fddp.Communicator(group)
    ranks.close()
    ranks.close()
    found = ending(lambda: fddp.psum(ONE, ranks))
    assert found.kinds[0] == "ClosedError"
    assert "is closed (close() was called); make a new one on every rank" in found.text


def test_a_branch_that_one_rank_does_not_take() -> None:
    over = threading.Event()

    def run(group: Any) -> Ending:
        with fddp.Communicator(group) as ranks:
            ranks.transport.timeout_s = 0.2  # but not of opening
            if group.rank == 0:
                found = ending(lambda: fddp.psum({"w": ONE}, ranks))
                over.set()
                return found
            over.wait(HANG_S)
            return ending(lambda: fddp.pmean(ONE, ranks))

    waiting, gone = fddp.loopback(2, run)
    assert waiting.kinds[0] == "SyncTimeoutError", waiting
    assert "psum of 1 leaf ('w'), called at " in waiting.text
    assert f"{__file__}:" in waiting.text
    assert "rank 1" in waiting.text
    # It hears of it, and where the others wait.
    assert gone.kinds[0] in ("SyncTimeoutError", "ClosedError", "RankLostError"), gone
    assert "pmean of 1 leaf ('')" in gone.text


def alone(before: Callable[[Any], Any], act: Callable[[Any], Any], **options: Any) -> Ending:
    """What rank 0 gets from a call that rank 1 does not join, after what both have called."""
    over = threading.Event()

    def run(group: Any) -> Ending | None:
        given = before(group)
        if group.rank:
            over.wait(HANG_S)
            return None
        found = ending(lambda: act(given))
        over.set()
        return found

    found, _ = fddp.loopback(2, run, **options)
    assert found is not None
    return found


def impatient(group: Any) -> fddp.Communicator:
    ranks = fddp.Communicator(group)
    ranks.transport.timeout_s = 0.2  # but not of opening
    return ranks


def test_a_missing_rank_in_derivatives() -> None:
    def forward(group: Any) -> tuple[fddp.Communicator, Tensor]:
        ranks = impatient(group)
        return ranks, fddp.psum(ONE.clone().requires_grad_(), ranks).sum()

    found = alone(forward, lambda given: given[1].backward())
    assert found.kinds[0] == "SyncTimeoutError"
    assert "backward of psum of 1 leaf (''), called at " in found.text
    assert f"{__file__}:" in found.text


def test_an_error_with_no_other_rank_in_the_call() -> None:
    found = alone(impatient, lambda ranks: fddp.pmean(torch.tensor(1), ranks))
    assert found.kinds[0] == "TypeError"
    assert "which can't represent a mean" in found.text


def test_opening_that_a_rank_does_not_join() -> None:
    found = alone(lambda group: group, lambda group: fddp.psum(ONE, group), timeout_s=0.3)
    assert found.kinds[0] == "SyncTimeoutError"
    assert f"psum, called at {__file__}:" in found.text
    assert "no response from rank 1" in found.text


# torch.func.jvp compiles decompositions when it is first used.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@on_threads(2)
def test_forward_mode_names_the_call(group: Any) -> None:
    def act() -> Any:
        if group.rank:
            return [fddp.psum(ONE, group), fddp.psum(ONE, group)]
        return jvp(lambda x: fddp.psum(x, group), (ONE,), (ONE,))

    found = ending(act)
    assert found.kinds[0] == "DesyncError"
    assert "jvp of psum of 1 leaf" in found.text
    assert found.text.count(f"{__file__}:") == 2
