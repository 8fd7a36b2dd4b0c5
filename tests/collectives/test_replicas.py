"""`fddp.check_replicas`: the first leaf in which replicas differ, named on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fddp
from fddp.collectives.communicator import communicator_of
from fddp.collectives.replicas.digest import bytes_of, digest_of
from tests.support.dtypes import DTYPE_NAMES
from tests.support.endings import Ending, ending
from tests.support.groups import rank_of
from tests.support.models import rand as random
from tests.support.on_ranks import on_threads
from tests.support.ranks import TRANSPORTS, Launch, launch_fixture
from tests.support.unsupported_tensors import Tagged, quantized

W = torch.ones(3)


launch = launch_fixture(*TRANSPORTS)


def values(*shape: int) -> Tensor:
    return random(*shape, seed=sum(shape))


# Digests


@settings(max_examples=50)
@given(st.integers(1, 200), st.data())
def test_any_change_of_bits_changes_the_digest(numel: int, data: Any) -> None:
    """Any bit, anywhere; two elements that change places; two signs at once."""
    tensor = values(numel).to(data.draw(st.sampled_from([torch.float32, torch.float64])))
    one, two = data.draw(st.tuples(st.integers(0, numel - 1), st.integers(0, numel - 1)))
    bit = data.draw(st.integers(0, tensor.element_size() * 8 - 1))
    changed = [tensor.clone() for _ in range(3)]
    bytes_of(changed[0])[one * tensor.element_size() + bit // 8] ^= 1 << bit % 8
    changed[1][[one, two]] = tensor[[two, one]]
    changed[2][[one, two]] *= -1
    for other in changed:
        same = torch.equal(bytes_of(other), bytes_of(tensor))
        assert (digest_of(other) == digest_of(tensor)) == same


def test_strides_and_bits() -> None:
    tensor = values(4, 6)
    digest = digest_of(tensor)
    assert digest_of(tensor.t().contiguous().t()) == digest
    assert digest_of(torch.stack([tensor, -tensor], -1)[..., 0]) == digest
    z = torch.complex(tensor, tensor)
    assert digest_of(z.conj()) == digest_of(z.conj().resolve_conj())
    assert digest_of(torch.zeros(2)) != digest_of(torch.zeros(3))
    assert digest_of(torch.zeros(0)) != digest_of(torch.zeros(1))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest_of(nans[:1]) != digest_of(nans[1:])
    assert digest_of(nans[:1]) == digest_of(torch.tensor([math.nan]))


# Trees


def tree() -> dict[str, Any]:
    leaves = {name: (10 * values(3, 4)).to(getattr(torch, name)) for name in DTYPE_NAMES}
    return {
        **leaves,
        "a list": [values(5), None, torch.tensor(3.0)],
        "empty": torch.zeros(0, 3),
        "expanded": values(1, 4).expand(3, 4),
        "fields": {"count": 7, "rate": 0.1, "name": "adam", "on": True},
        "large": torch.arange(200_000, dtype=torch.float32).view(100, 2000),
        "parameter": nn.Parameter(values(2)),
        "transposed": values(3, 4).t(),
    }


def test_equal_trees(launch: Launch) -> None:
    for opened in launch(3, equal):
        assert opened == 1


def equal(group: Any) -> int:
    own = tree()
    before = {key: digest_of(own[key]) for key in DTYPE_NAMES}
    for step in range(3):
        fddp.check_replicas(own, group, every=2, step=step)
    for other in (torch.tensor(-0.0), {}, None, (), [None, None], {"a": {"b": None}}):
        fddp.check_replicas(other, group)
    assert {key: digest_of(own[key]) for key in DTYPE_NAMES} == before
    fddp.psum(torch.ones(1), group)  # on the same communicator
    return len({id(communicator_of(group, None)) for _ in range(2)})


def set_(leaf: Tensor, place: Any, value: Any) -> None:
    with torch.no_grad():
        leaf[place] = value


def drift(own: Any, key: str) -> None:
    """Change one rank's replica."""
    if key == "large":
        set_(own["large"], (77, 1234), -1.0)
        set_(own["large"], (99, 0), -1.0)
        set_(own["transposed"], (0, 0), 0.5)
    elif key == "a sign":
        own["a list"][0].zero_()
    elif key == "a scalar":
        own["a list"][2].add_(1.0)
    elif key == "a number":
        own["fields"]["rate"] = 0.2
    elif key == "a longer number":
        own["fields"]["count"] = 1234
    elif key == "bool":
        own["bool"].logical_not_()
    elif key == "complex128":
        own["complex128"][2, 3] *= 2j


#: deviation of the last rank, the leaf, and further text of every rank's error
DRIFTS = {
    "large": (
        "large",
        "shape (100, 2000), float32",
        "at index (77, 1234): 155234.0 on rank 0 and -1.0 on rank 2",
        "one more leaf differs",
    ),
    "a scalar": ("a list.2", "shape (), float32", "its value: 3.0 on rank 0 and 4.0 on rank 2"),
    "a number": ("fields.rate", "float", "its value: 0.1 on rank 0 and 0.2 on rank 2"),
    "a longer number": ("fields.count", "int", "its value: 7 on rank 0 and 1234 on rank 2"),
    "bool": ("bool", "bool", "at index (0, 0)", "True", "False"),
    "complex128": ("complex128", "at index (2, 3)", "j)"),
}


@pytest.mark.parametrize("key", DRIFTS)
def test_a_replica_that_drifts(key: str) -> None:
    runs = fddp.loopback(3, drifting, key)
    path, *texts = DRIFTS[key]
    assert len({str(error) for error, _ in runs}) == 1, "the same on every rank"
    for error, after in runs:
        assert error.path == path
        assert error.ranks == (2,)
        for text in ("ranks 0 and 1 have digest", "rank 2 has digest", f"leaf {path!r}", *texts):
            assert text in str(error)
        assert "fddp.reconcile" in str(error), "the way out"
        assert after == 3.0, "the group goes on"


def drifting(group: Any, key: str) -> tuple[fddp.DesyncError, float]:
    own = tree()
    if rank_of(group) == 2:
        drift(own, key)
    with pytest.raises(fddp.DesyncError) as caught:
        fddp.check_replicas(own, group)
    return caught.value, fddp.psum(torch.tensor(1.0), group).item()


def test_on_real_processes(launch: Launch) -> None:
    runs = launch(2, drift_apart)
    assert runs[0] == runs[1]
    for key, (path, *_) in DRIFTS.items():
        assert f"leaf {path!r}" in runs[0][key]
        assert "rank 0 has digest" in runs[0][key]
    bits = "-0.0 (0x80000000) on rank 0 and 0.0 (0x00000000) on rank 1"
    assert f"at index 1: {bits}" in runs[0]["a sign"] or "0.0 on" in runs[0]["a sign"]


def drift_apart(group: Any) -> dict[str, str]:
    texts = {}
    for key in [*DRIFTS, "a sign"]:
        own = tree()
        if rank_of(group) == 1:
            drift(own, key)
        with pytest.raises(fddp.DesyncError) as caught:
            fddp.check_replicas(own, group)
        assert caught.value.ranks == (0, 1), "no side is the larger one"
        texts[key] = str(caught.value)
    return texts


@pytest.mark.parametrize(
    ("mine", "theirs", "outcome"),
    [
        (-0.0, 0.0, "0.0 on rank 0 and -0.0 on rank 1"),
        (0x7FC00001, 0x7FC00000, "nan (0x7fc00000) on rank 0 and nan (0x7fc00001) on rank 1"),
    ],
)
@on_threads(2)
def test_bits_count(group: Any, mine: float, theirs: float, outcome: str) -> None:
    own, value = torch.ones(3, dtype=torch.float32), mine if group.rank else theirs
    bits = torch.tensor([value], dtype=torch.int32 if isinstance(value, int) else torch.float32)
    own[1:2] = bits.view(torch.float32)
    found = ending(lambda: fddp.check_replicas({"w": own}, group))
    assert found.kinds[0] == "DesyncError"
    assert f"at index 1: {outcome}" in found.text


@on_threads(2)
def test_memory_layouts_may_differ(group: Any) -> None:
    own = values(3, 4)
    fddp.check_replicas({"w": own.t().contiguous().t() if group.rank else own}, group)


@on_threads(2)
def test_frozen_parameters_are_compared(group: Any) -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, group.rank)
    with pytest.raises(fddp.DesyncError, match="first in leaf 'weight'"):
        fddp.check_replicas(module.requires_grad_(False), group)


OTHERS: dict[str, tuple[Any, str]] = {
    "shape": ({"w": torch.zeros(4)}, "shape (3,), float32 on cpu where rank 1 has leaf 'w'"),
    "a leaf more": ({"w": torch.zeros(3), "x": torch.zeros(1)}, "only rank 1 has leaf 'x'"),
    "None": ({"w": None}, "only rank 0 has leaf 'w'"),
    "a number": ({"w": 1.0}, "float on cpu"),
}


@pytest.mark.parametrize("case", OTHERS)
@on_threads(2)
def test_trees_of_another_structure(group: Any, case: str) -> None:
    tree, text = OTHERS[case]
    own = tree if group.rank else {"w": torch.zeros(3)}
    with pytest.raises(fddp.DesyncError) as caught:
        fddp.check_replicas(own, group)
    assert text in str(caught.value)
    fddp.check_replicas(torch.ones(2), group)


def test_against_an_operator(launch: Launch) -> None:
    for found, total in launch(2, against_an_operator):
        assert found.kinds[0] == "DesyncError"
        assert "check_replicas" in found.text
        assert "psum" in found.text
        assert total == 2.0


def against_an_operator(group: Any) -> tuple[Ending, float]:
    one, call = torch.ones(1), fddp.check_replicas if rank_of(group) else fddp.psum
    return ending(lambda: call(one, group)), fddp.psum(one, group).item()


BAD = {
    "an object": ({"w": object()}, "TypeError", "leaf 'w' is a object"),
    "sparse": ({"w": torch.eye(2).to_sparse()}, "TypeError", "torch.sparse_coo"),
    "meta": ({"w": torch.empty(2, device="meta")}, "TypeError", "meta tensor"),
    "a subclass": ({"w": torch.zeros(2).as_subclass(Tagged)}, "TypeError", "leaf 'w' is a Tagged"),
    "quantized": (quantized(), "TypeError", "leaf 'w' is a quantized tensor (torch.qint8)"),
}


def check_alone(group: Any, call: Callable[[], Any], kind: str, text: str) -> None:
    """Rank 1 makes a mistake, which all ranks get; the group stays usable."""
    found = ending(call if group.rank else lambda: fddp.check_replicas({"w": W}, group))
    assert found.kinds[0] == (kind if group.rank else "PeerError")
    assert text in found.text
    assert group.rank or f"rank 1 can't take part: {kind}: " in found.text
    fddp.check_replicas({"w": W}, group)


@pytest.mark.parametrize("case", BAD)
@on_threads(2)
def test_a_tree_that_cannot_be_read(group: Any, case: str) -> None:
    own, kind, text = BAD[case]
    check_alone(group, lambda: fddp.check_replicas(own, group), kind, text)


@pytest.mark.parametrize(
    ("name", "value", "outcome"),
    [
        ("every", 0, "every=0 must be a number of steps above 0"),
        ("every", True, "every=True must be an int"),
        ("every", "3", "every='3' must be an int"),
        ("step", 2.0, "step=2.0 must be an int"),
    ],
)
@on_threads(2)
def test_periods_that_are_no_numbers(group: Any, name: str, value: Any, outcome: str) -> None:
    """On one rank, whose check the others would wait for."""
    numbers: Any = {"every": 2, "step": 4, name: value}
    kind = "ValueError" if "above" in outcome else "TypeError"
    call = lambda: fddp.check_replicas({"w": W}, group, **numbers)  # noqa: E731
    check_alone(group, call, kind, f"check_replicas: {outcome}" if not group.rank else outcome)


@pytest.mark.parametrize("numbers", [{"every": 3}, {"step": 12}], ids=str)
@pytest.mark.parametrize("moves", [False, True])
@on_threads(3)
def test_ranks_at_different_checks(group: Any, numbers: dict[str, int], moves: bool) -> None:
    """The error does not depend on the values."""
    usual = {"every": 2, "step": 6}
    theirs = {**usual, **numbers}
    own = theirs if group.rank == 1 else usual
    with pytest.raises(fddp.DesyncError) as caught:
        fddp.check_replicas({"w": torch.tensor(float(group.rank * moves))}, group, **own)
    fddp.check_replicas({"w": W}, group, **usual)
    text = str(caught.value)
    assert f"check_replicas of 1 leaf at step {own['step']}, every={own['every']}" in text
    assert (
        f"ranks 0 and 2 at step 6, every=2; rank 1 at step {theirs['step']}, "
        f"every={theirs['every']}; pass the same step and the same every" in text
    )
    assert (caught.value.path, caught.value.ranks) == ("", (1,))


def in_grad(tree: Any, group: Any) -> None:
    torch.func.grad(lambda x: (fddp.check_replicas({"w": x}, group), x.sum())[1])(tree["w"])


def in_vmap(tree: Any, group: Any) -> None:
    torch.func.vmap(lambda x: (fddp.check_replicas({"w": x}, group), x)[1])(tree["w"])


@pytest.mark.parametrize("check", [in_grad, in_vmap])
@pytest.mark.parametrize("alone", [False, True])
@on_threads(2)
def test_not_in_a_transform(group: Any, check: Any, alone: bool) -> None:
    own, within = {"w": torch.ones(2)}, group.rank == 0 or not alone
    found = ending(lambda: (check if within else fddp.check_replicas)(own, group))
    assert found.kinds[0] == ("TransformError" if within else "PeerError")
    assert f"check_replicas was called inside torch.func.{check.__name__[3:]}" in found.text
    fddp.check_replicas(own, group)  # the group is usable


def test_a_compiled_function_breaks_its_graph() -> None:
    def run(group: Any) -> Any:
        def step(x: Tensor) -> Tensor:
            y = x + 1
            fddp.check_replicas({"w": x}, group)
            return y * 2

        def other(x: Tensor) -> Tensor:
            fddp.check_replicas({"w": x}, group)
            return x

        compiled = torch.compile(step, backend="eager")
        equal = compiled(torch.ones(2)).tolist()
        differing = ending(lambda: compiled(torch.ones(2) * group.rank))
        whole = torch.compile(other, backend="eager", fullgraph=True)
        return equal, differing, ending(lambda: whole(torch.ones(2))).text

    torch._dynamo.reset()
    for equal, differing, whole in fddp.loopback(2, run):
        assert equal == [4.0, 4.0]
        assert differing.kinds[0] == "DesyncError"
        assert "at index 0: 0.0 on rank 0 and 1.0 on rank 1" in differing.text
        assert "call check_replicas outside of the compiled function" in whole


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (lambda rank: "a" * 60 + str(rank), "...aaaaaaaa0' on rank 0 and ...aaaaaaaa1' on rank 1"),
        (
            lambda rank: f"{rank}" + "b" * 100,
            f"'0{'b' * 54}... on rank 0 and '1{'b' * 54}... on rank 1",
        ),
    ],
)
@on_threads(2)
def test_long_values_are_shown_where_they_differ(group: Any, value: Any, outcome: str) -> None:
    found = ending(lambda: fddp.check_replicas({"n": value(group.rank)}, group))
    assert f"; its value: {outcome};" in found.text


@on_threads(3)
def test_three_sides(group: Any) -> None:
    """Of which the first two differ in a later element only."""
    own = torch.tensor([[1.0, 2.0], [1.0, 3.0], [9.0, 2.0]][group.rank])
    found = ending(lambda: fddp.check_replicas(own, group))
    assert "at index 0: 1.0 on rank 0 and 9.0 on rank 2" in found.text


@on_threads(2)
def test_equal_replicas_take_one_collective(group: Any) -> None:
    fddp.check_replicas(tree(), group)
    transport = communicator_of(group, None).transport
    started: list[int] = []
    start = transport._start

    def counting(operation: Any) -> Any:
        started.append(operation.tensor.nbytes // len(operation.ranks))
        return start(operation)

    transport._start = counting  # type: ignore[method-assign]
    fddp.check_replicas(tree(), group)
    fddp.check_replicas(tree(), group, every=3, step=4)
    assert started == [32]
