"""Sharded optimizers of wrapped modules: bits, parameters that have not arrived, and failures."""

from __future__ import annotations

import copy
import io
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fddp
from fddp.ddp.sharded_steps import ShardedOptimizer
from tests.support.endings import ending
from tests.support.models import same_bits
from tests.support.ranks import Launch, launch_fixture, run_fresh

launch = launch_fixture("c10d", "shm", "loopback")

STEPS = 4


class Net(nn.Module):
    """Layers of several kinds; the last one is tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4))
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.first(x)) * self.scale
        x, _ = self.recurrent(x[None])
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.last(x)  # type: ignore[no-any-return]


def new_net() -> Net:
    net = Net().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype))
    return net


def inputs(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def wrapped(net: nn.Module, group: Any, **options: Any) -> fddp.DistributedDataParallel:
    """Buckets of a leaf each, unless leaves are very small."""
    options = {"bucket_cap_mb": 5e-5, **options}
    return fddp.DistributedDataParallel(net, process_group=group, **options)


def make_adam(shards: Any) -> torch.optim.Optimizer:
    assert all(shard.dim() == 1 for shard in shards.values())
    return torch.optim.AdamW(shards.values(), lr=0.05, weight_decay=0.1)


def make_sgd(shards: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(shards.values(), lr=0.1)


def rank_of(group: Any) -> int:
    return group.rank if isinstance(group.rank, int) else group.rank()


def train(
    group: Any, is_sharded: bool, *, overlap: bool = False, **options: Any
) -> tuple[dict[str, Tensor], int]:
    """State of the module after a few steps of accumulated gradients, and the optimizer's size."""
    net = new_net()
    ddp = wrapped(net, group, **options)
    if is_sharded:
        optimizer: Any = ddp.sharded_optimizer(make_adam, overlap=overlap)
        inner = optimizer.inner
    else:
        optimizer = inner = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(STEPS):
        with ddp.no_sync():
            ddp(inputs(rank_of(group), step)).square().sum().backward()
        ddp(inputs(rank_of(group), 10 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {name: leaf.clone() for name, leaf in ddp.module.state_dict().items()}
    numel = sum(moments["exp_avg"].numel() for moments in inner.state.values())
    return state, numel


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["plain", "views"])
def test_bits_are_those_of_a_whole_optimizer(launch: Launch, options: dict[str, Any]) -> None:
    """Sums of two have one association."""
    plain = launch(2, train_with, False, options)
    sharded = launch(2, train_with, True, options)
    overlapped = launch(2, train_with, True, {**options, "overlap": True})
    assert same_bits([state for state, _ in (*plain, *sharded, *overlapped)])
    assert sum(numel for _, numel in sharded) == plain[0][1], "each element has one owner"


def train_with(group: Any, is_sharded: bool, options: dict[str, Any]) -> Any:
    return train(group, is_sharded, **options)


def ready(group: Any) -> tuple[Net, fddp.DistributedDataParallel, ShardedOptimizer]:
    """A net after one step, whose parameters may be in flight."""
    net = new_net()
    ddp = wrapped(net, group)
    optimizer = ddp.sharded_optimizer(make_adam, overlap=True)
    ddp(inputs(group.rank, 0)).square().sum().backward()
    optimizer.step()
    return net, ddp, optimizer


def test_a_submodule_waits_for_its_own_parameters() -> None:
    def run(group: Any) -> None:
        layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
        ddp = wrapped(layers, group)
        optimizer = ddp.sharded_optimizer(make_sgd, overlap=True)
        missing = []
        for layer in layers:
            layer.register_forward_hook(lambda *_: missing.append(len(optimizer._missing)))
        for _ in range(2):
            ddp(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert len(ddp.plan.buckets) == 4
        assert missing == [0, 0, 0, 0, 3, 2, 1, 0]

    fddp.loopback(2, run)


def test_any_use_of_a_parameter_waits_for_it() -> None:
    def run(group: Any) -> None:
        uses: list[Any] = [
            lambda net: net.scale.sum(),
            lambda net: net.first.weight.clone(),
            lambda net: next(iter(net.parameters())).tolist(),
            lambda net: torch.stack([net.scale, net.first.bias]),
            lambda net: repr(net.scale),
            lambda net: net.scale.data,
            lambda net: copy.deepcopy(net.scale),
            lambda net: pickle.dumps(net.scale),
            lambda net: torch.save(net.state_dict(), io.BytesIO()),
            lambda net: net.recurrent(torch.ones(1, 1, 4, dtype=torch.float64)),
            lambda net: Scaled.apply(net.scale),
        ]
        for use in uses:
            net, _, optimizer = ready(group)
            assert net.scale.shape == (4,)
            assert net.scale.grad is None
            net.scale.grad = None
            assert len(optimizer._missing) == len(optimizer._params)
            assert isinstance(net.scale, nn.Parameter)
            found = use(net)
            assert len(optimizer._missing) < len(optimizer._params)
            optimizer.wait()
            assert {type(param) for param in net.parameters()} == {nn.Parameter}
            assert not any(param.isnan().any() for param in net.parameters())
            expected = use(net)
            if isinstance(found, Tensor):
                assert torch.equal(found, expected)
            else:
                assert repr(found) == repr(expected)

    fddp.loopback(2, run)


@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_keep_their_strides(overlap: bool) -> None:
    """Also those of dimensions of one element, by which convolutions choose a memory format."""

    def run(group: Any) -> None:
        net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 1, 3), nn.Conv2d(1, 2, 3))
        net = net.to(memory_format=torch.channels_last)
        net[0].bias = nn.Parameter(torch.zeros(8)[::2])  # is dense afterwards
        ddp = wrapped(net, group)
        before = [param.stride() for param in net.parameters()]
        expected = [(1,) if strides == (2,) else strides for strides in before]
        optimizer = ddp.sharded_optimizer(make_sgd, overlap=overlap)
        for _ in range(2):
            ddp(torch.ones(1, 3, 6, 6)).sum().backward()
            optimizer.step()
            assert [param.stride() for param in net.parameters()] == expected
            assert net[0].weight.is_contiguous(memory_format=torch.channels_last)

    fddp.loopback(2, run)


class Scaled(torch.autograd.Function):
    """Gets a parameter as its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad


def test_copies_have_memory_of_their_own() -> None:
    def run(group: Any) -> None:
        net, ddp, optimizer = ready(group)
        twin = copy.deepcopy(net)
        expected = [param.detach().clone() for param in net.parameters()]
        ddp(inputs(group.rank, 1)).square().sum().backward()
        optimizer.step()
        assert same_bits([[*twin.parameters()], expected])
        with pytest.raises(TypeError, match="can't be pickled"):
            pickle.dumps(optimizer)

    fddp.loopback(2, run)


@pytest.mark.filterwarnings("ignore")
def test_compiled_modules_wait_for_their_parameters() -> None:
    def run(group: Any) -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        eager = copy.deepcopy(net)
        found = []
        for module in (torch.compile(net, backend="aot_eager"), eager):
            ddp = wrapped(module, group)
            optimizer = ddp.sharded_optimizer(make_sgd, overlap=True)
            for _ in range(3):
                ddp(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            optimizer.wait()
            found.append([param.detach() for param in ddp.parameters()])
        assert same_bits(found)

    fddp.loopback(1, run)


def test_saving_and_evaluation_wait() -> None:
    def run(group: Any) -> None:
        readers: list[Any] = [
            lambda net, ddp: ddp.state_dict(),
            lambda net, ddp: net.body.state_dict() and net.state_dict(),
            lambda net, ddp: ddp.load_state_dict(
                {name: torch.ones_like(leaf) for name, leaf in ddp.state_dict().items()}
            ),
        ]
        for read in readers:
            net, ddp, optimizer = ready(group)
            read(net, ddp)
            assert not optimizer._missing
        net, ddp, optimizer = ready(group)
        with torch.no_grad():
            found = ddp(inputs(0, 3))
        assert not optimizer._missing
        assert torch.equal(found, net(inputs(0, 3)))

    fddp.loopback(2, run)


def test_parameters_that_were_written_are_used_as_they_are() -> None:
    def run(group: Any) -> None:
        net = new_net()
        ddp = wrapped(net, group)
        optimizer = ddp.sharded_optimizer(
            lambda p: torch.optim.SGD(p.values(), lr=0.0), overlap=True
        )
        ones = {name: torch.ones_like(leaf) for name, leaf in net.state_dict().items()}
        for write in (
            lambda: net.load_state_dict(ones),
            lambda: nn.init.ones_(net.scale),
            lambda: net.scale.data.fill_(1.0),
            lambda: setattr(net.scale, "data", torch.ones_like(net.scale)),
        ):
            ddp(inputs(group.rank, 0)).square().sum().backward()
            optimizer.step()
            optimizer.wait()
            write()
            ddp(inputs(group.rank, 0)).square().sum().backward()
            optimizer.step()
            assert net.state_dict()["scale"].tolist() == [1.0] * 4
            assert net.state_dict()["first.bias"].tolist() == [1.0] * 4
            with torch.no_grad():
                net.scale.zero_()

    fddp.loopback(2, run)


def test_the_state_of_each_rank_is_saved_and_restored() -> None:
    def run(group: Any) -> Any:
        net, ddp, optimizer = ready(group)
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))

        def go_on(ddp: Any, optimizer: Any) -> Any:
            ddp(inputs(group.rank, 5)).square().sum().backward()
            optimizer.step()
            return {name: leaf.clone() for name, leaf in ddp.module.state_dict().items()}

        expected = go_on(ddp, optimizer)
        other = new_net()
        again = wrapped(other, group)
        resumed = again.sharded_optimizer(make_adam, overlap=True)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        assert same_bits([go_on(again, resumed), expected])
        return expected

    assert same_bits(fddp.loopback(2, run))


def test_gradients_add_up_until_the_step() -> None:
    def run(group: Any) -> list[float]:
        net = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(net.weight)
        ddp = wrapped(net, group)
        optimizer = ddp.sharded_optimizer(
            lambda p: torch.optim.SGD(p.values(), lr=1.0), overlap=True
        )
        x = torch.full((1, 4), 1.0 + group.rank)
        for _ in range(2):
            ddp(x).sum().backward()
        optimizer.step()
        ddp(x).sum().backward()
        optimizer.zero_grad()
        ddp(x).sum().backward()
        optimizer.step()
        return net.state_dict()["weight"][0].tolist()  # type: ignore[no-any-return]

    assert fddp.loopback(2, run) == [[-4.5] * 4] * 2


def test_unused_parameters_get_no_update() -> None:
    def run(group: Any) -> None:
        net = nn.ModuleDict({"used": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
        net.forward = lambda x: net["used"](x)  # type: ignore[method-assign]
        ddp = wrapped(net, group, find_unused_parameters=True)
        before = net["other"].weight.detach().clone()
        optimizer = ddp.sharded_optimizer(make_adam, overlap=True)
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert torch.equal(net.state_dict()["other.weight"], before)

    fddp.loopback(2, run)


class Subclass(nn.Parameter):
    """A parameter of a class of its own."""


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_without_overlap_parameters_never_wait() -> None:
    # Made here, because TorchScript can't compile a class on two threads at once.
    nets = [nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 1))) for _ in range(2)]

    def run(group: Any) -> None:
        scripted = nets[group.rank]
        part = nn.Linear(4, 4)
        part.weight = Subclass(part.weight.detach())
        for net, name in ((scripted, "TorchScript"), (part, "Subclass")):
            with pytest.raises(ValueError, match=f"does not go with overlap=True and .*{name}"):
                wrapped(net, group).sharded_optimizer(make_adam, overlap=True)
        net = scripted
        ddp = wrapped(net, group)
        optimizer = ddp.sharded_optimizer(make_sgd)
        for _ in range(2):
            before = [param.detach().clone() for param in net.parameters()]
            ddp(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            assert not optimizer._missing
            for old, param in zip(before, net.parameters(), strict=True):
                assert type(param) is nn.Parameter
                assert param.isfinite().all()
                assert not torch.equal(old, param)

    fddp.loopback(2, run)


def test_what_does_not_go_with_sharded_optimizers() -> None:
    def run(group: Any) -> None:
        net = nn.Linear(2, 2)
        ddp = wrapped(net, group, virtual_ranks=2)
        with pytest.raises(ValueError, match="does not go with virtual_ranks"):
            ddp.sharded_optimizer(make_adam, overlap=True)
        ddp = wrapped(nn.Embedding(4, 2, sparse=True), group)
        with pytest.raises(ValueError, match="does not go with sparse gradients"):
            ddp.sharded_optimizer(make_adam, overlap=True)
        ddp = wrapped(net, group)
        ddp.sharded_optimizer(make_adam, overlap=True)
        with pytest.raises(ValueError, match="does not go with a second one"):
            ddp.sharded_optimizer(make_adam, overlap=True)
        with pytest.raises(ValueError, match=r"join\(\) and a sharded optimizer can't be combined"):
            ddp.join()
        with pytest.raises(RuntimeError, match="group of a sharded optimizer can't change"):
            ddp._update_process_group(group)
        net.weight = nn.Parameter(torch.ones(2, 2))
        with pytest.raises(RuntimeError, match="shards would change their owners"):
            ddp(torch.ones(1, 2))

    fddp.loopback(1, run)


def test_an_error_within_in_step_reaches_all_ranks() -> None:
    def run(group: Any) -> Any:
        net, ddp, optimizer = ready(group)

        def fail() -> None:
            with ddp.in_step():
                if group.rank:
                    raise ValueError("bad input")
                ddp(inputs(0, 1)).square().sum().backward()

        seen = ending(fail)
        ddp(inputs(group.rank, 2)).square().sum().backward()
        optimizer.step()
        return seen.kinds[0], net.state_dict()

    first, second = fddp.loopback(2, run)
    assert (first[0], second[0]) == ("PeerError", "ValueError")
    assert same_bits([first[1], second[1]])


def lose_a_rank(rank: int, world_size: int, transport: str) -> Any:
    ddp = fddp.DistributedDataParallel(new_net(), transport=transport)
    optimizer = ddp.sharded_optimizer(make_adam, overlap=True)
    for step in range(2):
        ddp(inputs(rank, step)).square().sum().backward()
        if rank == 1 and step == 1:
            os._exit(3)
        optimizer.step()
    seen = ending(lambda: ddp(inputs(rank, 2)).square().sum().backward())
    return seen, ending(lambda: ddp.module.state_dict())


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_lost_rank_is_named_in_forward(transport: str) -> None:
    outcomes = run_fresh(3, lose_a_rank, transport, timeout_s=60.0)
    assert outcomes[1].exitcode == 3
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.error
        for seen in outcome.result:
            assert seen.kinds[0] == "RankLostError", seen
            assert "rank 1" in seen.text
