"""Training loops that keep replicas equal, after the README, the guide, the examples and notebooks.

A loop makes a few steps, and returns what must be equal on all ranks.
"""

# Loops are written as on the pages: short names, no types, and functions that are called at once.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: B023

from __future__ import annotations

import jax
import optax
import torch
import torchopt
from torch.func import functional_call, grad, grad_and_value, jvp, vjp, vmap
from torch.nn.functional import mse_loss

import fddp
from examples import dp_sgd, ensemble, hvp_cg, maml, physics
from fddp import averaging, periodic
from tests.testing.replication.loops.inputs import (
    LOCAL,
    MEANS,
    NOISE,
    OWN,
    ROUNDED,
    Loop,
    descend,
    init_params,
    jax_batches,
    jax_loss,
    jax_params,
    loss_fn,
    make_batches,
    make_module,
    module_with,
)

# The README and the guide


def readme(params, batches, group):
    params = fddp.broadcast(params, src=0)
    for batch in batches:
        grads = grad(loss_fn)(params, batch)
        grads = fddp.pmean(grads)
        params = descend(params, grads)
    return params


def readme_grad_sync(params, batches, group):
    params = fddp.broadcast(params, src=0)
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(loss_fn)
        for batch in batches:
            _, grads = step(params, batch)
            params = descend(params, grads)
    return params


def existing_gradients(params, batches, group):
    with fddp.GradSync(params) as sync:
        for batch in batches:
            grads = sync(grad(loss_fn)(params, batch))
            params = descend(params, grads)
    return params


def clipped(params, batches, group):
    with fddp.GradSync(params) as sync:
        for batch in batches:
            grads, info = sync(grad(loss_fn)(params, batch), with_info=True)
            factor = min(1.0, 1.0 / info.grad_norm)
            params = descend(params, fddp.tree_map(lambda g: g * factor, grads))
    return params


def accumulated(params, batches, group):
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(loss_fn)
        total = fddp.tree_map(torch.zeros_like, params)
        for batch in batches[:-1]:
            total = fddp.tree_map(torch.add, total, grad(loss_fn)(params, batch))
        _, grads = step(params, batches[-1], accumulated=(total, len(batches) - 1))
    return descend(params, grads)


def weighted(params, batches, group):
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(loss_fn, weight_fn=lambda params, batch: len(batch[0]))
        for batch in batches:
            _, grads = step(params, batch)
            params = descend(params, grads)
    return params


def uneven(params, batches, group):
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(loss_fn)
        for batch in fddp.uneven(batches, sync):
            _, grads = step(params, batch)
            params = descend(params, grads)
    return params


def mean_of_counts(params, batches, group):
    for x, y in batches:
        grads = fddp.psum(grad(lambda p: len(x) * loss_fn(p, (x, y)))(params))
        count = fddp.psum(torch.tensor(float(len(x))))
        params = descend(params, fddp.tree_map(lambda g: g / count, grads))
    return params


def mean_loss(params, batches, group):
    def global_loss(params, batch):
        return fddp.pmean(loss_fn(fddp.sync_on_backward(params), batch))

    for batch in batches:
        grads, loss = grad_and_value(global_loss)(params, batch)
        params = descend(params, grads)
    return {"params": params, "loss": loss}


def logged(params, batches, group):
    losses = []
    for batch in batches:
        grads, loss = grad_and_value(loss_fn)(params, batch)
        losses.append(loss.item())  # of this rank
        if loss.item() > 1e6:
            losses.clear()
        params = descend(params, fddp.pmean(grads))
    return params, losses


def backward(params, batches, group):
    for batch in batches:
        leaves = fddp.tree_map(lambda p: p.clone().requires_grad_(), params)
        loss_fn(leaves, batch).backward()
        grads = fddp.pmean(fddp.tree_map(lambda p: p.grad, leaves))
        params = descend(params, grads)
    return params


def sharded(params, batches, group):
    for batch in batches:
        flat = grad(lambda p: (batch[0] @ p).square().mean())(params)
        shard = fddp.reduce_scatter(flat, tiled=True) / group.size
        params = params - 0.1 * fddp.all_gather(shard, tiled=True)
    return params


def compressed(params, batches, group):
    with fddp.GradSync(params, hook=fddp.hooks.top_k(0.25)) as sync:
        step, state = sync.value_and_grad(loss_fn), sync.init_state()
        for batch in batches:
            _, grads, state = step(params, batch, hook_state=state)
            params = descend(params, grads)
    return params


def deterministic(params, batches, group):
    with fddp.GradSync(params, deterministic=True, bucket_cap_mb=1e-4) as sync:
        step = sync.value_and_grad(loss_fn)
        for batch in batches:
            _, grads = step(params, batch)
            params = descend(params, grads)
    return params


def local_sgd(params, batches, group):
    with averaging.Averager(params, averaging.Periodic(2, warmup_steps=1)) as averager:
        for number, batch in enumerate(batches):
            params = descend(params, grad(loss_fn)(params, batch))
            params = averager.average(params, number)
    return params


def diloco(params, batches, group):
    schedule = periodic.diloco(params, 2)
    with periodic.PeriodicSync(params, schedule, outer=periodic.sgd()) as slow_links:
        state = slow_links.init(params)
        for batch in batches:
            params = descend(params, grad(loss_fn)(params, batch))
            params, state = slow_links.step(params, state)
    return params


# Modules and optimizers


def module_and_optimizer(module, optimizer, batches, group):
    parameters = dict(module.named_parameters())

    def module_loss(parameters, batch):
        x, y = batch
        return mse_loss(functional_call(module, parameters, (x,)), y)

    with fddp.GradSync(parameters) as sync:
        step = sync.value_and_grad(module_loss)
        for batch in batches:
            _, grads = step(parameters, batch)
            for name, parameter in parameters.items():
                parameter.grad = grads[name]
            optimizer.step()


def wrapper(module, optimizer, batches, group):
    ddp = fddp.DistributedDataParallel(module)
    for x, y in batches:
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
    return loss


def wrapper_of_own(seeded, batches, group):
    module = make_module(seeded)
    ddp = fddp.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        mse_loss(ddp(x), y).backward()
        optimizer.step()
    return dict(module.named_parameters())


def hand_made(module, optimizer, batches, group):
    for x, y in batches:
        optimizer.zero_grad()
        mse_loss(module(x), y).backward()
        grads = fddp.pmean([p.grad for p in module.parameters()])
        for parameter, mean in zip(module.parameters(), grads, strict=True):
            parameter.grad = mean
        optimizer.step()


def torchopt_chain(params, batches, group):
    with fddp.GradSync(params) as sync:
        optimizer = torchopt.chain(fddp.as_transform(sync), torchopt.adam(1e-3))
        state = optimizer.init(params)
        for batch in batches:
            updates, state = optimizer.update(grad(loss_fn)(params, batch), state, inplace=False)
            params = torchopt.apply_updates(params, updates, inplace=False)
    return {"params": params, "state": state[1]}


def optax_adam(params, batches, group):
    optimizer = optax.adam(3e-3)
    state = optimizer.init(params)
    with fddp.GradSync(params) as sync:
        for batch in batches:
            grads = sync(jax.grad(jax_loss)(params, batch), weight=len(batch))
            updates, state = optimizer.update(grads, state)
            params = optax.apply_updates(params, updates)
    return {"params": params, "state": state}


def optax_chain(params, batches, group):
    with fddp.GradSync(params) as sync:
        optimizer = optax.chain(fddp.as_transform(sync), optax.sgd(0.3))
        state = optimizer.init(params)
        for batch in batches:
            updates, state = optimizer.update(jax.grad(jax_loss)(params, batch), state, params)
            params = optax.apply_updates(params, updates)
    return params


def jitted(params, batches, group):
    @jax.jit
    def step(params, batch):
        loss, grads = jax.value_and_grad(jax_loss)(params, batch)
        loss, grads = fddp.jax.pmean((loss, grads), group)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    for batch in batches:
        loss, params = step(params, batch)
    return {"params": params, "loss": loss}


def torchopt_adam(params, batches, group):
    optimizer = torchopt.adam(1e-3)
    state = optimizer.init(params)
    for batch in batches:
        grads = fddp.pmean(grad(loss_fn)(params, batch))
        updates, state = optimizer.update(grads, state, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
    return {"params": params, "state": state}


# Examples and notebooks


def maml_own_tasks(params, tasks, group):
    params = fddp.broadcast(params)
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(maml.meta_loss)
        for _ in range(2):
            _, grads = step(params, tasks)
            params = maml.descend(params, grads)
    return params


def maml_spread_tasks(params, tasks, group):
    def mean(grads):
        return fddp.pmean(grads)

    def spread_loss(params):
        return fddp.pmean(maml.meta_loss(fddp.sync_on_backward(params), tasks, mean))

    slope, loss = grad_and_value(spread_loss)(params)
    return {"params": maml.descend(params, slope), "loss": loss}


def newton_cg(params, batch, group):
    def global_loss(params):
        return fddp.pmean(hvp_cg.local_loss(fddp.sync_on_backward(params), batch))

    slope = grad(global_loss)(params)
    step, _ = hvp_cg.conjugate_gradients(global_loss, params, slope)
    params = hvp_cg.add(params, -1.0, step)
    return {"params": params, "loss": global_loss(params)}


def hessian_product(params, batch, group):
    def global_loss(params):
        return fddp.pmean(hvp_cg.local_loss(fddp.sync_on_backward(params), batch))

    direction = fddp.tree_map(torch.ones_like, params)
    forward = jvp(grad(global_loss), (params,), (direction,))[1]
    reverse = vjp(grad(global_loss), params)[1](direction)[0]
    return {"forward": forward, "reverse": reverse, "loss": global_loss(params)}


def private(params, batch, noises, group):
    samples = group.size * len(batch.x)
    for _ in range(2):
        clipped, _ = dp_sgd.clipped_sum(params, batch)
        total = fddp.psum(dp_sgd.noised(clipped, noises, group.size))
        params = dp_sgd.descend(params, total, samples)
    return params


def clipped_sums(params, batch, group):
    samples = group.size * len(batch.x)
    for _ in range(2):
        total = fddp.psum(dp_sgd.clipped_sum(params, batch)[0])
        params = dp_sgd.descend(params, total, samples)
    return params


def ensemble_of_models(params, batch, group):
    params = fddp.broadcast(params)
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(
            ensemble.ensemble_loss, weight_fn=lambda params, batch: len(batch.x)
        )
        for _ in range(2):
            _, grads = step(params, batch)
            params = ensemble.descend(params, grads)
    return params


def vmapped(params, batch, group):
    def total(params):
        params = fddp.sync_on_backward(params)
        losses = vmap(ensemble.loss_fn, in_dims=(0, None, None, 0))(params, *batch)
        return fddp.pmean(losses).sum()

    grads, loss = grad_and_value(total)(params)
    return {"grads": grads, "loss": loss}


def heat_equation(params, points, group):
    momentum = fddp.tree_map(torch.zeros_like, params)
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(
            physics.physics_loss, weight_fn=lambda params, points: len(points)
        )
        for _ in range(2):
            _, grads = step(params, points)
            momentum = fddp.tree_map(lambda m, g: 0.9 * m + g, momentum, grads)
            params = fddp.tree_map(lambda p, m: p - 0.03 * m, params, momentum)
    return params


def loops() -> list[Loop]:
    """All with new inputs."""
    params, uneven_batches = init_params(0), lambda rank: make_batches(rank)[: 1 + rank]
    tasks = lambda rank: maml.make_tasks(waves=rank, points=rank)  # noqa: E731
    w = {
        "w": torch.full((12,), 0.1, dtype=torch.float64),
        "b": torch.zeros((), dtype=torch.float64),
    }
    return [
        *(Loop(fn, (), (init_params, make_batches), OWN) for fn in (readme, readme_grad_sync)),
        *(
            Loop(fn, (params,), (make_batches,), MEANS)
            for fn in (
                *(existing_gradients, clipped, accumulated, mean_loss, logged, backward),
                *(deterministic, torchopt_chain, torchopt_adam),
            )
        ),
        *(Loop(fn, (params,), (make_batches,)) for fn in (weighted, mean_of_counts)),
        Loop(compressed, (params,), (make_batches,), ROUNDED),
        *(Loop(fn, (params,), (make_batches,), LOCAL) for fn in (local_sgd, diloco)),
        Loop(uneven, (params,), (uneven_batches,), OWN),
        Loop(sharded, (torch.ones(4),), (make_batches,), MEANS),
        Loop(optax_adam, (jax_params(),), (jax_batches,)),
        *(Loop(fn, (jax_params(),), (jax_batches,), MEANS) for fn in (optax_chain, jitted)),
        Loop(wrapper_of_own, (), (lambda rank: rank, make_batches), OWN),
        *(
            Loop(fn, module_with(optimizer), (make_batches(0),), MEANS, name=optimizer.__name__)
            for fn in (module_and_optimizer, wrapper, hand_made)
            for optimizer in (torch.optim.SGD, torch.optim.AdamW)
        ),
        Loop(maml_own_tasks, (), (maml.init_params, tasks), OWN),
        Loop(maml_spread_tasks, (maml.init_params(0),), (tasks,), OWN),
        *(
            Loop(fn, (w,), (hvp_cg.make_batch,), MEANS, is_forward=True)
            for fn in (newton_cg, hessian_product)
        ),
        Loop(private, (dp_sgd.init_params(),), (dp_sgd.make_batch(0), dp_sgd.noise_of), NOISE),
        Loop(clipped_sums, (dp_sgd.init_params(),), (dp_sgd.make_batch(0),), MEANS),
        Loop(ensemble_of_models, (), (ensemble.init_params, ensemble.make_batch), OWN),
        Loop(vmapped, (ensemble.init_params(0),), (ensemble.make_batch,), OWN),
        Loop(heat_equation, (physics.init_params(0),), (physics.make_points,), is_forward=True),
    ]
