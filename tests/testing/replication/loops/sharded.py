"""Loops in which each rank updates or sends a part; hooks, virtual ranks and local steps."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
from torch.func import grad

import fddp
from fddp import averaging, periodic
from tests.testing.replication.loops.inputs import (
    LOCAL,
    MEANS,
    OWN,
    ROUNDED,
    Loop,
    descend,
    init_params,
    loss_fn,
    make_batch,
)


def flat_loss(weights, x, y):
    return (x @ weights.view(4, 1) - y).square().mean()


def shards_of_the_mean(params, x, y):
    with fddp.GradSync(params, algorithm="reduce_scatter") as sync:
        mean = sync.all_gather(sync.reduce_scatter(grad(loss_fn)(params, (x, y))))
    return descend(params, mean)


def shards_of_a_flat_vector(weights, x, y, group):
    shard = fddp.reduce_scatter(grad(flat_loss)(weights, x, y), tiled=True) / group.size
    own = weights.chunk(group.size)[group.rank] - 0.1 * shard
    return fddp.all_gather(own, tiled=True)


def sharded_momentum(weights, momentum, x, y, group):
    shard = fddp.reduce_scatter(grad(flat_loss)(weights, x, y), tiled=True) / group.size
    momentum = 0.9 * momentum + shard
    own = weights.chunk(group.size)[group.rank] - 0.1 * momentum
    return fddp.all_gather(own, tiled=True), momentum


def owner_of_each_leaf(params, x, y, group):
    grads = fddp.pmean(grad(loss_fn)(params, (x, y)))
    leaves, treedef = fddp.extend.tree_flatten(params)
    updates = fddp.extend.tree_flatten(grads)[0]
    for number, update in enumerate(updates):
        owner = number % group.size
        new = leaves[number] - 0.1 * update if group.rank == owner else leaves[number]
        leaves[number] = fddp.broadcast_from(new, owner)
    return treedef.unflatten(leaves)


def rows_to_other_ranks(weights, x, y, group):
    parts = x[: len(x) // group.size * group.size].reshape(group.size, -1, 4)
    swapped = fddp.all_to_all(parts).flatten(0, 1)
    target = swapped.sum(1, keepdim=True)
    return weights - 0.1 * fddp.pmean(grad(flat_loss)(weights, swapped, target))


def along_two_axes(params, x, y):
    mesh = fddp.Topology(host=2, local=1)
    grads = fddp.pmean(grad(loss_fn)(params, (x, y)), mesh=mesh, axis="host")
    return descend(params, grads)


def hierarchical(params, x, y, group):
    mesh = fddp.Topology(host=group.size, local=1)
    with fddp.GradSync(params, mesh=mesh, algorithm="hierarchical") as sync:
        return descend(params, sync(grad(loss_fn)(params, (x, y))))


def low_rank(params, x, y):
    with fddp.GradSync(params, hook=fddp.hooks.power_sgd(2)) as sync:
        step, state = sync.value_and_grad(loss_fn), sync.init_state()
        for _ in range(2):
            _, grads, state = step(params, (x, y), hook_state=state)
            params = descend(params, grads)
    return params


def with_residuals(params, x, y):
    hook = fddp.hooks.error_feedback(fddp.hooks.int8())
    with fddp.GradSync(params, hook=hook) as sync:
        mean, state = sync.update(grad(loss_fn)(params, (x, y)), sync.init_state())
        params = descend(params, mean)
        mean, state = sync.update(grad(loss_fn)(params, (x, y)), state)
    return descend(params, mean)


def top_k_state(params, group):
    with fddp.GradSync(params, group=group, hook=fddp.hooks.top_k(0.25)) as sync:
        return sync.init_state()


def state_of_a_hook(params, state, x, y):
    with fddp.GradSync(params, hook=fddp.hooks.top_k(0.25)) as sync:
        mean, state = sync.update(grad(loss_fn)(params, (x, y)), state)
    return descend(params, mean), state


def two_bytes(params, x, y):
    half = fddp.tree_map(lambda p: p.bfloat16(), params)
    with fddp.GradSync(half, reduce_dtype=torch.float32) as sync:
        grads = sync(fddp.tree_map(lambda g: g.bfloat16(), grad(loss_fn)(params, (x, y))))
    return descend(params, fddp.tree_map(lambda g: g.float(), grads))


def virtual_ranks(params, data, group):
    with fddp.GradSync(params, virtual_ranks=4) as sync:
        step = sync.value_and_grad(loss_fn)
        for _ in range(2):
            batches = sync.virtual_batches(lambda number: make_batch(number))
            params = descend(params, step(params, batches)[1])
    return params


def averaged_once(params, x, y):
    for _ in range(3):
        params = descend(params, grad(loss_fn)(params, (x, y)))
    return averaging.average(params)


def streaming(params, x, y):
    schedule = periodic.streaming_diloco(params, 4, fragments=2, delay=1)
    with periodic.PeriodicSync(params, schedule, outer=periodic.sgd()) as links:
        state = links.init(params)
        for _ in range(8):
            params = descend(params, grad(loss_fn)(params, (x, y)))
            params, state = links.step(params, state)
    return fddp.pmean(params)  # fragments are averaged at other times, and mixed


def outer_momentum(params, x, y):
    hook = fddp.hooks.error_feedback(fddp.hooks.int4())
    with periodic.PeriodicSync(
        params, periodic.diloco(params, 2), outer=periodic.sgd(), hook=hook
    ) as links:
        state = links.init(params)
        for _ in range(4):
            params = descend(params, grad(loss_fn)(params, (x, y)))
            params, state = links.step(params, state)
    return params


def reconciled(params, x, y):
    params = descend(params, fddp.pmean(grad(loss_fn)(params, (x, y))))
    return fddp.broadcast(params, src=0)


def shares_of_one_rank(params, x, y, group):
    chosen = fddp.broadcast_from(torch.rand(4) if group.rank == 0 else torch.zeros(4), 0)
    mask = (chosen < 0.5).to(x.dtype)
    return descend(params, fddp.pmean(grad(loss_fn)(params, (x * mask, y))))


def loops() -> list[Loop]:
    """All with new inputs."""
    params, batch = init_params(0), make_batch(0, rows=8)
    weights = torch.linspace(-1.0, 1.0, 4)
    zeros = fddp.loopback(1, lambda group: top_k_state(params, group))[0]
    residuals = lambda rank: fddp.tree_map(lambda leaf: leaf + 0.1 * rank, zeros)  # noqa: E731
    return [
        *(
            Loop(fn, (params,), batch, MEANS)
            for fn in (shards_of_the_mean, hierarchical, reconciled)
        ),
        Loop(owner_of_each_leaf, (params,), batch, MEANS),
        Loop(along_two_axes, (params,), batch, "its mesh has two hosts"),
        *(Loop(fn, (params,), batch, ROUNDED) for fn in (low_rank, with_residuals, two_bytes)),
        *(Loop(fn, (params,), batch, LOCAL) for fn in (averaged_once, streaming, outer_momentum)),
        Loop(state_of_a_hook, (params,), (residuals, *batch), OWN),
        Loop(shards_of_a_flat_vector, (weights,), batch, MEANS),
        Loop(sharded_momentum, (weights,), (torch.tensor([0.5, -0.2]), *batch), OWN),
        Loop(rows_to_other_ranks, (weights,), batch, MEANS),
        Loop(virtual_ranks, (params,), (torch.ones(4),), OWN),
        Loop(shares_of_one_rank, (params,), batch, "one rank draws for all"),
    ]
