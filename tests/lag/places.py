"""What is used less often on a device, or on one that is not the current one, each compared with
one process on the CPU."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fddp
from fddp import periodic
from fddp.sync import autotune, measure
from fddp.tree.pytree import flatten, tree_map
from tests.lag.functional import check_hook
from tests.lag.rank import CAP, SMALL, Rank, mean_square, means, module, placed, slow
from tests.support.endings import ending
from tests.support.models import batch, mean_gradients, mlp, mlp_loss


def operators_on_two_devices(rank: Rank) -> None:
    """Operators on leaves of two devices, and their derivatives."""
    there = rank.other
    places = {"a": there, "b": rank.device, "c": there, "d": rank.device}
    with fddp.Communicator(rank.group) as ranks:
        for number in range(3):
            both = [
                {name: batch(own, number + n) for n, name in enumerate(places)} for own in range(2)
            ]
            for own, tree in enumerate(both):
                tree["a"] = torch.arange(4) + own  # without a derivative
            tree = {name: leaf.to(places[name]) for name, leaf in both[rank.number].items()}
            late = {name: leaf * 1 if name == "a" else slow(leaf) for name, leaf in tree.items()}
            found = fddp.psum(late, ranks)
            assert {name: leaf.device for name, leaf in found.items()} == places
            rank.check(found, tree_map(torch.add, *both))
            rank.check(fddp.all_gather(tree, ranks), tree_map(lambda *own: torch.stack(own), *both))
            given = {name: tree[name].clone().requires_grad_(name != "a") for name in places}
            total = fddp.psum({name: leaf**2 for name, leaf in given.items()}, ranks)
            sum(total[name].sum().to(rank.device) for name in "bcd").backward()
            grads = {name: given[name].grad for name in "bcd"}
            rank.check(grads, {name: 4 * both[rank.number][name] for name in "bcd"})


def operators_in_turns(rank: Rank) -> None:
    """An operator on the CPU, a device and another one, of one shape."""
    with fddp.Communicator(rank.group) as ranks:
        for number in range(2):
            both = torch.stack([batch(0, number), batch(1, number)])
            for place in (torch.device("cpu"), rank.device, rank.other):
                found = fddp.psum(both[rank.number].to(place), ranks)
                assert found.device == place, found.device
                rank.check(found, both.sum(0))


def graphs_on_another_device(rank: Rank) -> None:
    """Steps of leaves and of a plan, and operators, in a graph."""
    torch._dynamo.reset()
    there = rank.other
    params = tree_map(lambda leaf: leaf.to(there), mlp())
    plan = fddp.plan_buckets(params, **SMALL)
    with (
        fddp.GradSync(params, group=rank.group, **SMALL) as sync,
        fddp.GradSync(plan, group=rank.group) as planned,
        fddp.Communicator(rank.group, bucket_cap_mb=SMALL["bucket_cap_mb"]) as ranks,
    ):
        steps = [sync.value_and_grad(mlp_loss), planned.value_and_grad(mlp_loss)]

        def step(params: Any, x: Tensor) -> list[Any]:
            by_operator = fddp.pmean(torch.func.grad(mlp_loss)(params, x), ranks)
            by_operator = tree_map(lambda mean, leaf: mean + 0.0 * leaf, by_operator, params)
            return [by_operator, *(take(params, x)[1] for take in steps)]

        compiled: Any = torch.compile(step, backend="aot_eager", fullgraph=True)
        for number in range(2):
            for grads in compiled(params, batch(rank.number, number).to(there)):
                assert all(leaf.device == there for leaf in flatten(grads)[0])
                rank.check(grads, means(number))


def hooks_that_choose(rank: Rank) -> None:
    """Hooks that choose compressors or values."""
    hooks = fddp.hooks
    further = (hooks.auto(smallest=1), hooks.top_k(0.3), hooks.block_top_k(0.3))
    for place in (rank.device, rank.other):
        for hook in (*further, hooks.error_feedback(hooks.int4())):
            check_hook(rank, hook, place, 1e-6)


def _square(grads: Any) -> float:
    return sum(float(leaf.square().sum()) for leaf in flatten(grads)[0])


def _check_norms(info: fddp.SyncInfo, own: float, total: float) -> None:
    (found,) = info.squared_norms.values()
    assert abs(found.own / own - 1.0) < 1e-9, (found, own)
    assert abs(found.total / total - 1.0) < 1e-9, (found, total)


def noise_of_parts(rank: Rank) -> None:
    """Squared norms of gradients with those of an earlier micro-batch, and of virtual ranks."""
    params, grad = rank.put(mlp()), torch.func.grad(mlp_loss)
    with fddp.GradSync(params, group=rank.group, noise=True, **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss, with_info=True)
        for number in range(2):
            first, second = (rank.put(batch(rank.number, number + n)) for n in range(2))
            _, _, info = step(params, second, accumulated=(grad(params, first), 1.0))
            squares = []
            for own in range(2):
                parts = [grad(mlp(), batch(own, number + n)) for n in range(2)]
                squares.append(_square(tree_map(torch.add, *parts)) / 2)
            _check_norms(info, squares[rank.number], sum(squares))
    with fddp.GradSync(params, group=rank.group, noise=True, virtual_ranks=5, **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss, with_info=True)
        for number in range(2):
            inputs = [rank.put(batch(virtual, number)) for virtual in sync.carried_ranks]
            _, _, info = step(params, sync.virtual_batches(inputs))
            squares = [_square(grad(mlp(), batch(virtual, number))) for virtual in range(5)]
            _check_norms(
                info, sum(squares[virtual] for virtual in sync.carried_ranks), sum(squares)
            )


def gradients_of_virtual_ranks(rank: Rank) -> None:
    """Gradients of virtual ranks that exist, for a plan."""
    there = rank.other
    params = tree_map(lambda leaf: leaf.to(there), mlp())
    plan = fddp.plan_buckets(params, **SMALL)
    with fddp.GradSync(plan, group=rank.group, virtual_ranks=5) as sync:
        for number in range(2):
            inputs = [batch(virtual, number) for virtual in range(5)]
            own = [inputs[virtual].to(there) for virtual in sync.carried_ranks]
            trees = [torch.func.grad(mlp_loss)(params, x) for x in own]
            expected = mean_gradients(mlp_loss, mlp(), [(x,) for x in inputs], [1.0] * 5)
            rank.check(sync(sync.virtual_batches(trees)), expected)


def averaged_from_a_state(rank: Rank) -> None:
    """A periodic average whose state was saved and loaded, and an outer optimizer."""
    like = {"w": torch.zeros(300)}
    outer = periodic.sgd(1.0, momentum=0.0)
    for schedule, given in (
        (periodic.local_sgd(like, 2, delay=1), {}),
        (periodic.diloco(like, 2), {"outer": outer}),
    ):
        params = rank.put({"w": torch.full((300,), 1.0 + rank.number)})
        options: dict[str, Any] = {"group": rank.group, **given}
        with periodic.PeriodicSync(params, schedule, **options) as sync:
            start = {"w": torch.full_like(params["w"], 1.5)} if given else params
            state = sync.init(start)
            for _ in range(4):
                params, state = sync.step(params, copy.deepcopy(state))
                rank.overwrite_free()
            rank.check(params, {"w": torch.full((300,), 1.5)})


def _table(device: torch.device, values: Tensor) -> Tensor:
    """Sparse gradient of a table of ten rows."""
    index = torch.tensor([[1, 4]])[:, : len(values)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first sparse tensor of a process may warn
        return torch.sparse_coo_tensor(index, values, (10, 3)).to(device)


def sparse_of_some_ranks(rank: Rank) -> None:
    """A sparse gradient that one rank lacks, that has no rows, or in which one rank has a NaN."""
    host = {"table": torch.arange(30.0).double().reshape(10, 3), "w": torch.ones(3).double()}
    params = rank.put(host)

    def sparse_loss(p: Any, index: Tensor) -> Tensor:
        if not len(index):
            return p["w"].square().sum()
        rows = nn.functional.embedding(index, p["table"], sparse=True)
        return p["w"].square().sum() + (rows * p["w"]).square().sum()

    def loss(p: Any, index: Tensor) -> Tensor:
        return p["w"].square().sum() + (p["table"][index] * p["w"]).square().sum()

    def dense(grads: Any) -> Any:
        return {"table": grads["table"].to_dense(), "w": grads["w"]}

    inputs = [torch.tensor([1, 1, 4]), torch.tensor([], dtype=torch.int64)]
    expected = mean_gradients(loss, host, [(index,) for index in inputs], [1.0, 1.0])
    with fddp.GradSync(params, sparse=["table"], group=rank.group) as sync:
        step = sync.value_and_grad(sparse_loss)
        for _ in range(3):
            _, grads = step(params, rank.put(inputs[rank.number]))
            rank.check(dense(grads), expected)
        nothing = _table(rank.device, torch.zeros(0, 3).double())
        grads = sync({"table": nothing, "w": params["w"]})
        assert grads["table"].device == rank.device
        rank.check(dense(grads), {"table": torch.zeros(10, 3).double(), "w": host["w"]})
    good = torch.ones(2, 3).double()
    bad = good * float("nan") if rank.number == 1 else good
    for policy, report in (("raise", "now"), ("raise", "next"), ("skip", "now")):
        options: dict[str, Any] = {"sparse": ["table"], "nonfinite": policy, "report": report}
        with fddp.GradSync(params, group=rank.group, **options) as sync:
            sync({"table": _table(rank.device, good), "w": params["w"]})
            grads = {"table": _table(rank.device, bad), "w": params["w"]}
            if policy == "skip":
                assert sync(grads)["w"] is None
                continue
            if report == "next":
                sync(grads)
            found = ending(sync.check if report == "next" else partial(sync, grads))
            assert found.kinds[0] == "NonFiniteError", found
            assert "table" in found.text, found


def times_on_another_device(rank: Rank) -> None:
    """Times of buckets, measured costs, and those by which a plan is tuned."""
    there = rank.other
    params = tree_map(lambda leaf: leaf.to(there), mlp())
    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss, with_info=True)
        for number in range(3):
            _, grads, info = step(params, batch(rank.number, number).to(there))
            rank.check(grads, means(number))
            assert all(bucket.launch_s <= bucket.done_s for bucket in info.timeline.buckets)
        with mock.patch.object(autotune, "measure_axes", return_value={}) as measured:
            autotune._costs(sync._engine, sync.plan)
        assert measured.call_args.kwargs["device"] == there
    with (
        mock.patch.object(measure, "start", wraps=measure.start) as start,
        mock.patch.object(torch, "zeros", wraps=torch.zeros) as zeros,
        mock.patch.object(torch, "ones", wraps=torch.ones) as ones,
    ):
        fddp.measure_cost(rank.group, sizes_bytes=(1000,), repeats=1, device=there)
    assert {call.args[2].device for call in start.call_args_list} == {there}
    assert mock.call(1, device=there) in zeros.call_args_list  # of a barrier
    assert {call.kwargs.get("device") for call in ones.call_args_list} == {there}  # work beside


def buffers_changed_on_one_rank(rank: Rank) -> None:
    """Buffers that one rank has replaced by some of another shape."""
    net = module(rank.device)
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    for number in range(2):
        mean_square(ddp, rank.put(batch(rank.number, number))).backward()
    if rank.number == 1:
        norm: Any = net[1]
        norm.running_mean = rank.put(torch.zeros(9).double())
    found = ending(lambda: mean_square(ddp, rank.put(batch(rank.number, 2))).backward())
    assert found.kinds[0] == ("RankLostError", "DesyncError")[rank.number], found


def zeros_of_buckets(rank: Rank) -> None:
    """Zeros in the form of buckets, for torch's joins, and counts of use, are on the device."""
    ddp = fddp.DistributedDataParallel(
        module(rank.device), process_group=rank.group, bucket_cap_mb=CAP
    )
    for bucket in ddp.reducer._get_zeros_like_grad_buckets():
        assert bucket.buffer().device == rank.device
    mean_square(ddp, rank.put(batch(rank.number, 0))).backward()
    assert ddp.reducer._get_local_used_map().device == rank.device


def state_of_another_device(rank: Rank) -> None:
    """The state of the newest rank."""
    there = rank.other
    own = {"w": slow(torch.full((300,), 1.0 + rank.number, device=there).double())}
    found, _ = fddp.reconcile(own, rank.group, step=rank.number)
    assert found["w"].device == there
    rank.check(found, {"w": torch.full((300,), 2.0).double()})


class _Reversed(nn.Module):
    """Two layers, registered in another order than that of their names, on two devices."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.z = nn.Linear(8, 8).double().to(rank.device)
        self.a = nn.Linear(8, 8).double().to(rank.other)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(self.z(x)).to(self.a.weight.device))  # type: ignore[no-any-return]


def labels_of_devices(rank: Rank) -> None:
    """Leaves whose devices are numbered by one that is not reduced, or in the order of names."""
    hook = fddp.hooks.power_sgd(2)
    params = {
        "a": torch.arange(3).to(rank.other),
        "b": torch.randn(16, 16).to(rank.device),
        "c": torch.randn(16, 16).to(rank.other),
    }
    with fddp.GradSync(params, group=rank.group, hook=hook, **SMALL) as sync:
        sync.update(params, sync.init_state())
    net = _Reversed(rank)
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    for bucket in ddp.reducer._get_zeros_like_grad_buckets():
        assert {p.device for p in bucket.parameters()} == {bucket.buffer().device}
    x = rank.put(batch(rank.number, 0))
    with ddp.weighted(float("nan") if rank.number == 1 else 1.0):
        found = ending(lambda: ddp(x).sum().backward())
    assert found.kinds[0] == ("PeerError", "WeightError")[rank.number], found
    ddp.register_comm_hook(None, hook)
    ddp(x).sum().backward()


def averaged_on_two_devices(rank: Rank) -> None:
    """Averages by the backend where it has them, also after a rebuild."""
    there = rank.other
    params = {n: leaf.to(there if n > "b" else rank.device) for n, leaf in _three().items()}
    sync: Any = fddp.GradSync(params, group=rank.group, **SMALL)
    scaling = sync.schedule.scaling
    assert scaling == ("average" if sync._engine.transport.averages([there.type]) else "before")
    rank.check(sync(params), _three())
    sync = sync.rebuild(rank.group)
    assert sync.schedule.scaling == scaling
    rank.check(sync(params), _three())
    sync.close()


def _three() -> dict[str, Tensor]:
    return {name: torch.full((20,), 1.0 + n).double() for n, name in enumerate("abc")}


def joined_on_another_device(rank: Rank) -> None:
    """A new rank that fails its first step, with leaves on another device than the current one, or
    has passed no leaves."""
    params = tree_map(lambda leaf: leaf.to(rank.other), mlp())
    backend = dist.get_backend_config(rank.group)
    alone = [dist.new_group([number], backend=backend) for number in range(2)]
    for given in (params, None):
        sync: Any
        if rank.number == 0:
            sync = fddp.GradSync(params, group=alone[0], **SMALL).rebuild(rank.group)
        else:
            sync = fddp.GradSync.join(rank.group, params=given)
        if given is not None:
            found = ending(partial(sync, {} if rank.number == 1 else params))
            assert found.kinds[0] == ("PeerError", "TreeMismatchError")[rank.number], found
        rank.check(sync(params), mlp())
        sync.close()


def averaged_on_another_stream(rank: Rank) -> None:
    """A periodic average in a fixed order, which goes on on another stream than its first."""
    like = {"w": torch.zeros(300).double()}
    away, busy = torch.Stream(device=rank.device), rank.put(torch.ones(1).double())
    home = torch.accelerator.current_stream(rank.device)
    params = rank.put({"w": torch.full((300,), 1.0 + rank.number).double()})
    schedule = periodic.local_sgd(like, 4, delay=3)
    options: dict[str, Any] = {"group": rank.group, "deterministic": True}
    with periodic.PeriodicSync(params, schedule, **options) as sync:
        state = sync.init(params)
        for number in range(7):
            if number not in (4, 5):
                params, state = sync.step(params, state)
                continue
            away.wait_stream(home)
            with away:
                slow(slow(slow(busy)))
                _, state = sync.step(params, state)
            for numel in (300, 2400, 150, 600, 75):
                for _ in range(4):
                    torch.full((numel,), 7.0, device=rank.device, dtype=torch.float64)
        rank.check(params, {"w": torch.full((300,), 1.5).double()})


def buffers_moved_on_one_rank(rank: Rank) -> None:
    """Buffers of which one rank has moved one, or all, to another device."""
    for moved in (("running_mean",), ("running_mean", "running_var", "num_batches_tracked")):
        net = module(rank.device)
        ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
        for number in range(2):
            mean_square(ddp, rank.put(batch(rank.number, number))).backward()
        norm: Any = net[1]
        if rank.number == 1:
            for name in moved:
                setattr(norm, name, getattr(norm, name).to(rank.other))
        x = rank.put(batch(rank.number, 2))
        found = ending(lambda ddp=ddp, x=x: mean_square(ddp, x).backward())
        assert found.kinds[0] == ("RankLostError", "DesyncError")[rank.number], found
        if rank.number == 1:
            assert ("running_mean" if len(moved) == 1 else "moved to another") in found.text, found


def unused_in_graphs(rank: Rank) -> None:
    """Steps in graphs without gradients of a leaf, or of a whole bucket, of one or two devices."""
    there = rank.other
    for first, last in ((there, there), (rank.device, there), (there, rank.device)):
        torch._dynamo.reset()
        params = placed(mlp(), first, last)
        plan = fddp.plan_buckets(params, **SMALL)
        for source, layer, left in (
            (plan, "layer2", {}),
            (params, "layer1", {"weight"}),
            (params, "layer2", {"weight", "bias"}),
        ):
            options: dict[str, Any] = {} if source is plan else SMALL
            with fddp.GradSync(source, group=rank.group, **options) as sync:
                compiled: Any = torch.compile(
                    lambda grads, sync=sync: sync(grads), backend="aot_eager", fullgraph=True
                )
                expected = means(0)
                grads = placed(expected, first, last)
                for name in left:
                    grads[layer][name] = None
                    expected[layer][name] = torch.zeros_like(expected[layer][name])
                found = compiled(grads)
                at = [leaf.device for leaf in flatten(params)[0]]
                assert [leaf.device for leaf in flatten(found)[0]] == at
                rank.check(found, expected)


class _Sized(fddp.hooks.Hook[tuple[()]]):
    """A hook that sums buffers of another size on each rank."""

    name = "sized"

    def __init__(self, more: int) -> None:
        self._more = more

    def init(self, spec: fddp.hooks.BucketSpec) -> tuple[()]:
        return ()

    def apply(self, state: Any, bucket: Any, all_reduce: Any) -> Any:
        numel = len(bucket.buffer)
        total = all_reduce(bucket.buffer.new_zeros(numel + self._more))
        return total.map(lambda sums: (sums[:numel], state))


def hook_of_other_sizes(rank: Rank) -> None:
    """A hook whose tensors differ in size between ranks, which hangs or aborts backends."""
    params = rank.put(mlp())
    options: dict[str, Any] = {"timeout_s": 20, **SMALL}
    with fddp.GradSync(params, group=rank.group, hook=_Sized(rank.number), **options) as sync:
        found = ending(partial(sync, params))
        assert found.kinds[0] == "DesyncError", found
        assert "same size" in found.text, found


def reconciled_from_the_device(rank: Rank) -> None:
    """A newest state on the CPU, for a rank whose own is on a device."""
    own = {"w": torch.full((300,), 1.0 + rank.number).double()}
    if rank.number == 0:
        own = rank.put(own)
    found, _ = fddp.reconcile(own, rank.group, step=rank.number)
    assert found["w"].device == own["w"].device
    rank.check(found, {"w": torch.full((300,), 2.0).double()})
