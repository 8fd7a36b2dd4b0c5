"""Loops of the guide's recipes and of papers, written with functions of parameters and state."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: B023

from __future__ import annotations

import io

import torch
from torch.func import grad, grad_and_value, vmap
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import fddp
from tests.testing.replication.loops.inputs import (
    LOCAL,
    MEANS,
    NOISE,
    ROUNDED,
    Loop,
    descend,
    init_params,
    loss_fn,
    make_batch,
    zeros_like,
)


def mean_of_rows(grads, rows):
    """The mean over the rows of all ranks, of gradients of a mean over this rank's."""
    total = fddp.psum(torch.tensor(float(rows)))
    return fddp.psum(fddp.tree_map(lambda g: g * (rows / total), grads))


def norm_of(tree):
    return (
        torch.stack([leaf.square().sum() for leaf in fddp.extend.tree_flatten(tree)[0]]).sum()
        ** 0.5
    )


# Optimizers written out


def momentum(params, velocity, x, y):
    grads = mean_of_rows(grad(loss_fn)(params, (x, y)), len(x))
    velocity = fddp.tree_map(lambda v, g: 0.9 * v + g, velocity, grads)
    return descend(params, velocity), velocity


def adam(params, state, x, y):
    grads = fddp.pmean(grad(loss_fn)(params, (x, y)))
    count = state["count"] + 1
    m = fddp.tree_map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    v = fddp.tree_map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], grads)
    updates = fddp.tree_map(
        lambda m, v: (m / (1 - 0.9**count)) / ((v / (1 - 0.99**count)).sqrt() + 1e-3), m, v
    )
    return descend(params, updates), {"m": m, "v": v, "count": count}


def decoupled_weight_decay(params, x, y):
    grads = fddp.pmean(grad(loss_fn)(params, (x, y)))
    return fddp.tree_map(lambda p, g: p - 0.1 * g - 0.01 * p, params, grads)


def penalty_after_the_mean(params, x, y):
    grads = mean_of_rows(grad(loss_fn)(params, (x, y)), len(x))
    return descend(params, fddp.tree_map(lambda g, p: g + 0.01 * p, grads, params))


def lookahead(params, slow, number, x, y):
    params = descend(params, fddp.pmean(grad(loss_fn)(params, (x, y))))
    number = number + 1
    if number % 2 == 0:
        slow = fddp.tree_map(lambda s, p: s + 0.5 * (p - s), slow, params)
        params = slow
    return params, slow, number


def majority_of_signs(params, x, y):
    signs = fddp.tree_map(torch.sign, grad(loss_fn)(params, (x, y)))
    return descend(params, fddp.tree_map(torch.sign, fddp.pmean(signs)))


def warm_up(params, number, x, y):
    grads = fddp.pmean(grad(loss_fn)(params, (x, y)))
    rate = 0.1 * min(1.0, (number + 1) / 5)
    return fddp.tree_map(lambda p, g: p - rate * g, params, grads), number + 1


def rate_by_the_number_of_ranks(params, x, y, group):
    grads = fddp.pmean(grad(loss_fn)(params, (x, y)))
    return fddp.tree_map(lambda p, g: p - 0.01 * group.size * g, params, grads)


def rate_that_is_read(params, rate, x, y):
    grads = fddp.pmean(grad(loss_fn)(params, (x, y)))
    return fddp.tree_map(lambda p, g: p - rate * g, params, grads)


def centred_gradients(params, x, y):
    grads = fddp.pmean(grad(loss_fn)(params, (x, y)))
    return descend(params, fddp.tree_map(lambda g: g - g.mean(), grads))


# Clipping


def clip_values(params, x, y):
    grads = fddp.pmean(grad(loss_fn)(params, (x, y)))
    return descend(params, fddp.tree_map(lambda g: g.clamp(-0.5, 0.5), grads))


def clip_by_norm(params, x, y):
    grads = mean_of_rows(grad(loss_fn)(params, (x, y)), len(x))
    factor = (1.0 / norm_of(grads)).clamp(max=1.0)
    return descend(params, fddp.tree_map(lambda g: g * factor, grads))


def clip_by_size_of_parameters(params, x, y):
    def clip(p, g):
        return g * (0.1 * p.norm() / (g.norm() + 1e-6)).clamp(max=1.0)

    grads = fddp.pmean(grad(loss_fn)(params, (x, y)))
    return descend(params, fddp.tree_map(clip, params, grads))


def clip_each_sample(params, x, y):
    grads = vmap(grad(loss_fn), in_dims=(None, 0))(params, (x, y))
    squares = [g.flatten(1).square().sum(1) for g in fddp.extend.tree_flatten(grads)[0]]
    factors = (1.0 / torch.stack(squares).sum(0).sqrt()).clamp(max=1.0)
    sums = fddp.psum(fddp.tree_map(lambda g: torch.einsum("n,n...->...", factors, g), grads))
    rows = fddp.psum(torch.tensor(float(len(x))))
    return descend(params, fddp.tree_map(lambda g: g / rows, sums))


def skip_spikes(params, history, x, y):
    with fddp.GradSync(params) as sync:
        grads, info = sync(grad(loss_fn)(params, (x, y)), with_info=True)
    is_spike = info.grad_norm > 10.0 * history
    history = 0.9 * history + 0.1 * min(info.grad_norm, 10.0 * float(history))
    return (params if is_spike else descend(params, grads)), history


# Accumulation


def sums_and_counts(params, x, y):
    total, rows = zeros_like(params), 0.0
    for part in zip(x.split(2), y.split(2), strict=True):
        grads = grad(lambda p: len(part[0]) * loss_fn(p, part))(params)
        total, rows = fddp.tree_map(torch.add, total, grads), rows + len(part[0])
    total, rows = fddp.psum((total, torch.tensor(rows)))
    return descend(params, fddp.tree_map(lambda g: g / rows, total))


def accumulated_with_counts(params, x, y):
    total = zeros_like(params)
    *earlier, last = zip(x.split(2), y.split(2), strict=True)
    for part in earlier:
        grads = grad(loss_fn)(params, part)
        total = fddp.tree_map(lambda t, g: t + len(part[0]) * g, total, grads)
    weight = float(sum(len(part[0]) for part in earlier))
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(loss_fn, weight_fn=lambda params, batch: len(batch[0]))
        _, grads = step(params, last, accumulated=(total, weight))
    return descend(params, grads)


def every_second_call(params, held, number, x, y):
    held = fddp.tree_map(torch.add, held, fddp.pmean(grad(loss_fn)(params, (x, y))))
    number = number + 1
    if number % 2 == 0:
        params, held = descend(params, held), zeros_like(held)
    return params, held, number


# Averages of parameters


def moving_average(params, average, x, y):
    params = descend(params, mean_of_rows(grad(loss_fn)(params, (x, y)), len(x)))
    return params, fddp.tree_map(lambda a, p: a.lerp(p, 0.01), average, params)


def running_mean(params, mean, count, x, y):
    params = descend(params, fddp.pmean(grad(loss_fn)(params, (x, y))))
    return params, fddp.tree_map(lambda m, p: m + (p - m) / (count + 1), mean, params), count + 1


def local_steps(params, x, y):
    for part in zip(x.split(1), y.split(1), strict=True):
        params = descend(params, grad(loss_fn)(params, part))
    return fddp.pmean(params)


def local_steps_counted(params, x, y):
    for number in range(4):
        params = descend(params, grad(loss_fn)(params, (x, y)))
        if number % 2 == 1:
            params = fddp.pmean(params)
    return params


# Several gradients in a step


def sharpness_aware(params, x, y):
    up = fddp.pmean(grad(loss_fn)(params, (x, y)))
    factor = 0.05 / norm_of(up)
    near = fddp.tree_map(lambda p, g: p + factor * g, params, up)
    return descend(params, fddp.pmean(grad(loss_fn)(near, (x, y))))


def sharpness_aware_of_each_rank(params, x, y):
    up = grad(loss_fn)(params, (x, y))
    factor = 0.05 / norm_of(up)
    near = fddp.tree_map(lambda p, g: p + factor * g, params, up)
    return descend(params, fddp.pmean(grad(loss_fn)(near, (x, y))))


def gradient_penalty(params, x, y):
    def loss(params):
        slopes = vmap(grad(lambda x, y: loss_fn(params, (x, y))))(x, y)
        return loss_fn(params, (x, y)) + 0.01 * slopes.square().sum(1).mean()

    return descend(params, fddp.pmean(grad(loss)(params)))


def squares_of_samples(params, squares, x, y):
    grads = vmap(grad(loss_fn), in_dims=(None, 0))(params, (x, y))
    rows = fddp.psum(torch.tensor(float(len(x))))
    sums = fddp.psum(fddp.tree_map(lambda g: torch.stack([g, g * g]).sum(1), grads))
    squares = fddp.tree_map(lambda s, t: 0.9 * s + 0.1 * t[1] / rows, squares, sums)
    steps = fddp.tree_map(lambda t, s: t[0] / rows / (s.sqrt() + 0.1), sums, squares)
    return descend(params, steps), squares


def trace_of_curvature(params, estimate, generator, x, y):
    signs = fddp.tree_map(lambda p: torch.randn(p.shape, generator=generator).sign(), params)

    def along(params):
        grads = grad(loss_fn)(params, (x, y))
        leaves, others = fddp.extend.tree_flatten(grads)[0], fddp.extend.tree_flatten(signs)[0]
        return sum((g * s).sum() for g, s in zip(leaves, others, strict=True))

    product = mean_of_rows(grad(along)(params), len(x))
    estimate = fddp.tree_map(lambda e, h, s: 0.9 * e + 0.1 * h * s, estimate, product, signs)
    return params, estimate, generator


# Decisions by numbers that are equal on all ranks


def only_if_finite(params, x, y):
    grads, loss = grad_and_value(loss_fn)(params, (x, y))
    if torch.isfinite(fddp.pmean(loss)):
        grads = fddp.pmean(grads)
        return descend(params, grads)
    return params


def backtracking(params, x, y):
    def total(params):
        return fddp.psum(len(x) * loss_fn(params, (x, y)))

    grads = mean_of_rows(grad(loss_fn)(params, (x, y)), len(x))
    before, rate = total(params), 1.0
    for _ in range(8):
        after = fddp.tree_map(lambda p, g: p - rate * g, params, grads)
        if total(after) < before:
            return after
        rate /= 2
    return params


def best_so_far(params, best, x, y):
    grads, loss = grad_and_value(loss_fn)(params, (x, y))
    grads, loss = fddp.pmean((grads, loss))
    return descend(params, grads), torch.minimum(best, loss)


def rate_on_plateau(params, state, x, y):
    grads, loss = grad_and_value(loss_fn)(params, (x, y))
    loss = fddp.pmean(loss)
    rate = state["rate"] * (0.5 if loss >= state["loss"] else 1.0)
    params = fddp.tree_map(lambda p, g: p - rate * g, params, fddp.pmean(grads))
    return params, {"rate": rate, "loss": loss}


def loss_scale(params, scale, x, y):
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(lambda p: scale["factor"] * loss_fn(p, (x, y)), with_info=True)
        _, grads, info = step(params)
    if info.all_finite:
        params = fddp.tree_map(lambda p, g: p - 0.1 * (g / scale["factor"]), params, grads)
    next_scale = fddp.numerics.next_loss_scale(fddp.numerics.LossScale(**scale), info.all_finite)
    return params, {"factor": next_scale.factor, "streak": next_scale.streak}


def skip_nonfinite(params, x, y):
    with fddp.GradSync(params, nonfinite="skip") as sync:
        _, grads = sync.value_and_grad(loss_fn)(params, (x, y))
    return descend(params, grads)


# Random numbers


def seeded_noise(params, generator, x, y):
    grads = fddp.pmean(grad(loss_fn)(params, (x, y)))
    noisy = fddp.tree_map(lambda g: g + 0.1 * torch.randn(g.shape, generator=generator), grads)
    return descend(params, noisy), generator


def seeded_by_the_step(params, number, x, y):
    generator = torch.Generator().manual_seed(1000 + number)
    mask = (torch.rand(4, generator=generator) < 0.5).float()
    grads = mean_of_rows(grad(loss_fn)(params, (x * mask, y)), len(x))
    return descend(params, grads), number + 1


def own_dropout(params, x, y):
    return descend(params, fddp.pmean(grad(loss_fn)(params, (dropout(x, 0.25), y))))


def mixed_rows(params, x, y):
    order = torch.randperm(len(x))
    mixed = 0.7 * x + 0.3 * x[order], 0.7 * y + 0.3 * y[order]
    return descend(params, fddp.pmean(grad(loss_fn)(params, mixed)))


# What only one rank does


def one_rank_logs_and_saves(params, x, y, group):
    grads, loss = grad_and_value(loss_fn)(params, (x, y))
    params = descend(params, fddp.pmean(grads))
    if group.rank == 0:
        print(f"loss {loss.item():.3f}")
        torch.save(params, io.BytesIO())
    return params


def checked_replicas(params, x, y):
    params = descend(params, fddp.pmean(grad(loss_fn)(params, (x, y))))
    fddp.check_replicas(params)
    return params


# The guide's steps


def weighted_step(params, x, y):
    with fddp.GradSync(params) as sync:
        _, grads = sync.value_and_grad(loss_fn, weight_fn=lambda p, batch: len(batch[0]))(
            params, (x, y)
        )
    return descend(params, grads)


def weighted_existing(params, x, y):
    with fddp.GradSync(params) as sync:
        return descend(params, sync(grad(loss_fn)(params, (x, y)), weight=len(x)))


def reduced_in_place(params, x, y):
    grads = grad(loss_fn)(params, (x, y))
    with fddp.GradSync(params) as sync:
        sync.reduce_(grads)
    return descend(params, grads)


def started_and_awaited(params, x, y):
    with fddp.GradSync(params) as sync:
        handle = sync.start(grad(loss_fn)(params, (x, y)))
        decayed = fddp.tree_map(lambda p: 0.99 * p, params)
        return descend(decayed, handle.wait())


def donated(params, x, y):
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(loss_fn)
        for _ in range(2):
            _, grads = step(params, (x, y))
            params = descend(params, grads)
            sync.donate(grads)
    return params


def reports_next(params, x, y):
    with fddp.GradSync(params, report="next") as sync:
        step = sync.value_and_grad(loss_fn)
        for _ in range(2):
            params = descend(params, step(params, (x, y))[1])
        sync.check()
    return params


def checkpointed(params, x, y):
    def loss(params, batch):
        return checkpoint(loss_fn, params, batch, use_reentrant=False, preserve_rng_state=False)

    with fddp.GradSync(params) as sync:
        return descend(params, sync.value_and_grad(loss)(params, (x, y))[1])


def with_a_hook_of_two_bytes(params, x, y):
    with fddp.GradSync(params, hook=fddp.hooks.bf16_compress) as sync:
        return descend(params, sync.value_and_grad(loss_fn)(params, (x, y))[1])


def loops() -> list[Loop]:
    """All with new inputs."""
    params, batch = init_params(0), make_batch(0, rows=8)
    zeros = zeros_like(params)
    moments = {"m": zeros, "v": zeros, "count": 0}
    generator = torch.Generator().manual_seed(3)
    one = torch.tensor(1.0)
    return [
        *(
            Loop(fn, (params,), batch)
            for fn in (
                *(penalty_after_the_mean, clip_by_norm, clip_each_sample, sums_and_counts),
                *(accumulated_with_counts, backtracking, weighted_step, weighted_existing),
            )
        ),
        *(
            Loop(fn, (params,), batch, MEANS)
            for fn in (
                *(decoupled_weight_decay, centred_gradients, clip_values),
                *(clip_by_size_of_parameters, sharpness_aware, gradient_penalty, only_if_finite),
                *(skip_nonfinite, one_rank_logs_and_saves, checked_replicas, reduced_in_place),
                *(started_and_awaited, donated, reports_next, checkpointed),
            )
        ),
        *(Loop(fn, (params,), batch, LOCAL) for fn in (local_steps, local_steps_counted)),
        *(Loop(fn, (params,), batch, NOISE) for fn in (own_dropout, mixed_rows)),
        Loop(majority_of_signs, (params,), batch, "each rank has one vote"),
        Loop(sharpness_aware_of_each_rank, (params,), batch, "each rank climbs by itself"),
        Loop(with_a_hook_of_two_bytes, (params,), batch, ROUNDED),
        Loop(rate_by_the_number_of_ranks, (params,), batch, "its rate grows with the ranks"),
        Loop(momentum, (params, zeros), batch),
        Loop(moving_average, (params, params), batch),
        Loop(squares_of_samples, (params, zeros), batch),
        Loop(trace_of_curvature, (params, zeros, generator), batch),
        Loop(seeded_by_the_step, (params, 0), batch),
        Loop(adam, (params, moments), batch, MEANS),
        Loop(lookahead, (params, params, 1), batch, MEANS),
        Loop(warm_up, (params, 0), batch, MEANS),
        Loop(rate_that_is_read, (params, torch.tensor(0.1)), batch, MEANS),
        Loop(skip_spikes, (params, one), batch, MEANS),
        Loop(every_second_call, (params, zeros, 1), batch, MEANS),
        Loop(running_mean, (params, params, 1), batch, MEANS),
        Loop(best_so_far, (params, 9.0 * one), batch, MEANS),
        Loop(rate_on_plateau, (params, {"rate": 0.1 * one, "loss": one}), batch, MEANS),
        Loop(loss_scale, (params, {"factor": 256.0, "streak": 0}), batch, MEANS),
        Loop(seeded_noise, (params, generator), batch, MEANS),
    ]
