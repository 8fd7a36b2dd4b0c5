"""Tensors whose own memory does not hold their values, at every entrance that takes tensors.

They are refused by name, on all ranks at the same place, or the result is right: never a read of
their address, and never a rank that waits for another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fddp
from fddp import periodic
from fddp.averaging import Averager, Periodic
from fddp.native.memory import wrapper_kind
from tests.support.unsupported_tensors import WRAPPERS

if TYPE_CHECKING:
    from tests.support.ranks import RankPool

W = torch.arange(4.0)
Entrance = Callable[[Any, Tensor], Any]


def sync(**options: Any) -> Any:
    return fddp.GradSync({"w": W}, timeout_s=20, **options)


def module(w: Tensor, *, trained: bool = True, is_buffer: bool = False) -> Any:
    made = nn.Linear(3, 2)
    if is_buffer:
        made.register_buffer("w", w)
    else:
        made.w = nn.Parameter(w, requires_grad=trained)
    return made


def constructed(tree: Any, group: Any) -> Any:
    with fddp.GradSync(tree, group=group) as own:
        return own({"w": W})


def called(method: str) -> Entrance:
    def call(group: Any, w: Tensor) -> Any:
        with sync(group=group) as own:
            return getattr(own, method)({"w": w})

    return call


def loss_params(group: Any, w: Tensor) -> Any:
    with sync(group=group) as own:
        return own.value_and_grad(lambda p: p["w"].sum())({"w": w})[1]


def hook_state(group: Any, w: Tensor) -> Any:
    with sync(group=group, hook=fddp.hooks.top_k(0.5)) as own:
        (state,) = own.init_state()
        return own.update({"w": W}, ({**state, "residual": w},))[0]


def hook_result(group: Any, w: Tensor) -> Any:
    def hook(state: None, bucket: Any) -> Any:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(w)
        return future

    with sync(group=group, hook=fddp.hooks.TorchHook(None, hook)) as own:
        return own({"w": W})


def periodic_sync(group: Any, w: Tensor) -> Any:
    schedule = periodic.local_sgd({"w": W}, 1)
    with periodic.PeriodicSync({"w": W}, schedule, group=group, timeout_s=20) as own:
        return own.step({"w": w}, own.init({"w": W}))[0]


def averager(group: Any, w: Tensor) -> Any:
    with Averager({"w": W}, Periodic(1), group=group, timeout_s=20) as own:
        own.average_({"w": w}, 0)


def wrapped(**kind: bool) -> Entrance:
    def wrap(group: Any, w: Tensor) -> Any:
        return bits(fddp.DistributedDataParallel(module(w, **kind), process_group=group).module.w)

    return wrap


def forward(group: Any, w: Tensor) -> Any:
    ddp = fddp.DistributedDataParallel(module(W.clone(), is_buffer=True), process_group=group)
    ddp(torch.ones(1, 3))
    ddp.module.w = w
    ddp(torch.ones(1, 3))
    return bits(ddp.module.w)


def backward(group: Any, w: Tensor) -> Any:
    own = module(W.clone())
    ddp = fddp.DistributedDataParallel(own, process_group=group)
    own.w.register_hook(lambda grad: w)
    (ddp(torch.ones(1, 3)).sum() + own.w.sum()).backward()
    return own.w.grad


def bits(tensor: Any) -> Any:
    """The tensors that a tensor holds, or itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.detach()
    names, _ = tensor.__tensor_flatten__()
    return [bits(getattr(tensor, name)) for name in names]


ENTRANCES: dict[str, Entrance] = {
    "broadcast": lambda group, w: fddp.broadcast({"w": w}, group=group),
    "reconcile": lambda group, w: fddp.reconcile({"w": w}, group, step=group.rank)[0],
    "check_replicas": lambda group, w: fddp.check_replicas({"w": w}, group),
    "pmean": lambda group, w: fddp.pmean({"w": w}, group),
    "pmax": lambda group, w: fddp.pmax({"w": w}, group),
    "broadcast_from": lambda group, w: fddp.broadcast_from({"w": w}, 0, group),
    "all_gather": lambda group, w: fddp.all_gather({"w": w}, group),
    "GradSync": lambda group, w: constructed({"w": w}, group),
    "a call": called("__call__"),
    "reduce_": called("reduce_"),
    "value_and_grad": loss_params,
    "the state of a hook": hook_state,
    "the result of a hook": hook_result,
    "PeriodicSync": periodic_sync,
    "Averager": averager,
    "a parameter": wrapped(),
    "a frozen parameter": wrapped(trained=False),
    "a buffer": wrapped(is_buffer=True),
    "a buffer in forward": forward,
    "a gradient": backward,
}

# Of other dtypes or layouts than those of the plan, or made local by autograd itself.
REFUSED_BY_TORCH = {
    "a parameter": {"quantized tensor", "MaskedTensor", "tensor of a torch.func transform"},
    "a frozen parameter": {"MaskedTensor", "tensor of a torch.func transform"},
    "a gradient": {
        "quantized tensor",
        "NestedTensor",
        "nested tensor",
        "tensor of a torch.func transform",
    },
}


def attempt(entrance: Entrance, group: Any, w: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes of torch, and rounded copies
        try:
            return entrance(group, w)
        except Exception as error:
            return error


def check(entrance: str, kind: str, outcomes: list[Any]) -> None:
    case = f"{entrance} of a {kind}: {outcomes}"
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if not errors:
        first, second = (torch.utils._pytree.tree_leaves(outcome) for outcome in outcomes)
        assert all(map(torch.equal, first, second)), case
        return
    assert len(errors) == len(outcomes), case
    for error in errors:
        assert not isinstance(error, (fddp.RankLostError, fddp.SyncTimeoutError)), case
        assert any(place in str(error) for place in ("'w'", "bucket 0", "1 of qint8")), case
        words = (kind, "nested", "former vmap", "qint8", "jagged")
        assert any(word in str(error) for word in words), case


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_refused_on_all_ranks_or_right(entrance: str) -> None:
    for kind, make in WRAPPERS.items():
        if kind in REFUSED_BY_TORCH.get(entrance, ()):
            continue
        outcomes = fddp.loopback(2, lambda g, m=make: attempt(ENTRANCES[entrance], g, m()))
        check(entrance, kind, outcomes)


@pytest.mark.parametrize("entrance", sorted(ENTRANCES.keys() - {"a buffer in forward"}))
def test_on_one_rank_alone(entrance: str) -> None:
    for kind in ("DTensor", "TwoTensor"):

        def run(group: Any, kind: str = kind) -> Any:
            w = WRAPPERS[kind]() if group.rank == 1 else W.clone()
            return attempt(ENTRANCES[entrance], group, w)

        outcomes = fddp.loopback(2, run)
        if entrance == "GradSync" and kind != "DTensor":
            assert torch.equal(outcomes[0]["w"], outcomes[1]["w"])  # only shapes are read
            continue
        assert all(isinstance(outcome, Exception) for outcome in outcomes), (kind, outcomes)
        lost = (fddp.RankLostError, fddp.SyncTimeoutError)
        assert not any(isinstance(outcome, lost) for outcome in outcomes), (kind, outcomes)
        assert kind in str(outcomes[0]), "the other rank names it, too"


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_kind_is_named(kind: str) -> None:
    assert wrapper_kind(WRAPPERS[kind]()).startswith(kind)


def over_memory(rank: int, world_size: int) -> list[str]:
    """Over shared memory, where an address is read; with a real mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    sharded = fully_shard(nn.Linear(4, 4), mesh=mesh)
    w = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
    group = dist.group.WORLD
    calls: list[Callable[[], object]] = [
        lambda: fddp.broadcast({"w": w}),
        lambda: fddp.DistributedDataParallel(sharded),
        lambda: fddp.DistributedDataParallel(module(w, trained=False)),
        lambda: fddp.broadcast({"w": WRAPPERS["FakeTensor"]()}),
        lambda: ENTRANCES["a buffer"](group, WRAPPERS["FakeTensor"]()),
    ]
    found = []
    for call in calls:
        try:
            call()
            found.append("no error")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_over_shared_memory(ranks: RankPool) -> None:
    for texts in zip(*ranks.run(2, over_memory), strict=True):
        kind = "FakeTensor" if "FakeTensor" in texts[0] else "DTensor"
        assert all(kind in text and "Lost" not in text for text in texts), texts
