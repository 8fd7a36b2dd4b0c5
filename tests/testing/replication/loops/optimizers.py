"""Optimizers of torch, torchopt and optax around averaged gradients."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import torch
import torchopt
from torch.func import grad
from torch.nn.functional import mse_loss

import fddp
from tests.testing.replication.loops.inputs import (
    MEANS,
    Loop,
    init_params,
    jax_batches,
    jax_loss,
    jax_params,
    loss_fn,
    make_batch,
    make_module,
    module_with,
)


def set_gradients(module, grads):
    for parameter, mean in zip(module.parameters(), grads, strict=True):
        parameter.grad = mean


def torch_optimizer(module, optimizer, x, y):
    rows = fddp.psum(torch.tensor(float(len(x))))
    loss = (module(x) - y).square().sum() / rows
    set_gradients(module, fddp.psum(torch.autograd.grad(loss, [*module.parameters()])))
    optimizer.step()


def closure(module, x, y):
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)

    def loss_and_gradients():
        loss = mse_loss(module(x), y)
        grads = torch.autograd.grad(loss, [*module.parameters()])
        loss, grads = fddp.pmean((loss.detach(), grads))
        set_gradients(module, grads)
        return loss

    optimizer.step(loss_and_gradients)


def with_torchopt(optimizer):
    def torchopt_step(params, x, y):
        state = optimizer.init(params)
        for _ in range(2):
            grads = fddp.pmean(grad(loss_fn)(params, (x, y)))
            updates, state = optimizer.update(grads, state, params=params, inplace=False)
            params = torchopt.apply_updates(params, updates, inplace=False)
        return params

    return torchopt_step


def torchopt_clipped(params, x, y):
    with fddp.GradSync(params) as sync:
        clip = torchopt.clip.clip_grad_norm(0.5)
        optimizer = torchopt.chain(fddp.as_transform(sync), clip, torchopt.sgd(0.1, momentum=0.9))
        state = optimizer.init(params)
        updates, state = optimizer.update(grad(loss_fn)(params, (x, y)), state, inplace=False)
    return torchopt.apply_updates(params, updates, inplace=False)


def with_optax(optimizer):
    def optax_step(params, state, x):
        rows = fddp.psum(jnp.array(float(len(x))))
        grads = jax.grad(lambda p: len(x) / rows * jax_loss(p, x))(params)
        updates, state = optimizer.update(fddp.psum(grads), state, params)
        return optax.apply_updates(params, updates), state

    return optax_step


def optax_transform(params, x):
    optimizer = optax.chain(fddp.as_transform(fddp.pmean), optax.adam(1e-2))
    updates, _ = optimizer.update(jax.grad(jax_loss)(params, x), optimizer.init(params), params)
    return optax.apply_updates(params, updates)


def jitted_weighted(params, x, group):
    @jax.jit
    def step(params, x):
        grads, rows = jax.grad(lambda p: len(x) * jax_loss(p, x))(params), jnp.array(float(len(x)))
        grads, rows = fddp.jax.psum((grads, rows), group)
        return jax.tree.map(lambda p, g: p - 0.1 * g / rows, params, grads)

    return step(params, x)


def loops() -> list[Loop]:
    """All with new inputs."""
    params, batch, rows = init_params(0), make_batch(0, rows=8), jax_batches(0)[0]
    optimizers = [
        *(torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.NAdam),
        *(torch.optim.RAdam, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop),
    ]
    in_optax = {
        "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
        "adamw": optax.adamw(1e-2),
        "lion": optax.lion(1e-2),
        "yogi": optax.yogi(1e-2),
        "rmsprop": optax.rmsprop(1e-2),
        "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
        "every second": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        "if finite": optax.apply_if_finite(optax.sgd(0.1), 3),
        "scheduled": optax.sgd(optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 10)),
    }
    return [
        *(
            Loop(torch_optimizer, module_with(made), batch, name=made.__name__)
            for made in optimizers
        ),
        Loop(
            *(torch_optimizer, module_with(torch.optim.Adam, amsgrad=True), batch), name="amsgrad"
        ),
        Loop(
            *(torch_optimizer, module_with(torch.optim.SGD, momentum=0.9, nesterov=True), batch),
            name="nesterov",
        ),
        Loop(closure, (make_module(0),), batch, MEANS),
        *(
            Loop(with_torchopt(make(1e-2)), (params,), batch, MEANS, name=make.__name__)
            for make in (torchopt.rmsprop, torchopt.adagrad, torchopt.adamw)
        ),
        Loop(torchopt_clipped, (params,), batch, MEANS),
        *(
            Loop(with_optax(made), (jax_params(), made.init(jax_params())), (rows,), name=name)
            for name, made in in_optax.items()
        ),
        Loop(optax_transform, (jax_params(),), (rows,), MEANS),
        Loop(jitted_weighted, (jax_params(),), (rows,)),
    ]
