"""Losses that are means, sums and statistics over the rows of one rank."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy, normalize

import fddp
from tests.testing.faults.fault import (
    AVERAGED,
    DIVIDED_TWICE,
    MEAN_OF_MEANS,
    OWN_COUNT,
    OWN_STATISTICS,
    SUMMED,
    Fault,
    descend,
    linear_params,
    make_rows,
    make_tokens,
    mean_gradient,
    row_loss,
    rows_of_all,
    token_loss,
    tokens,
)

# Tokens


def mean_over_own_tokens(params, x, labels):
    grads = grad(lambda p: token_loss(p, x, labels) / tokens(labels))(params)
    return descend(params, fddp.pmean(grads))


def mean_over_all_tokens(params, x, labels):
    total = fddp.psum(tokens(labels))
    grads = grad(lambda p: token_loss(p, x, labels) / total)(params)
    return descend(params, fddp.psum(grads))


def mean_of_shares(params, x, labels):
    total = fddp.psum(tokens(labels))
    grads = grad(lambda p: token_loss(p, x, labels) / total)(params)
    return descend(params, fddp.pmean(grads))  # divides by the number of ranks, too


# Sums and means


def mean_of_sums(params, x, y):
    return descend(params, fddp.pmean(grad(row_loss)(params, x, y)), 0.01)


def sum_of_sums(params, x, y):
    return descend(params, fddp.psum(grad(row_loss)(params, x, y)), 0.01)


def loss_times_ranks(params, x, y, group):
    total = fddp.psum(torch.tensor(float(len(x))))
    share = group.size / total  # makes of the mean the sum that is wanted
    grads = grad(lambda p: group.size * share * row_loss(p, x, y))(params)
    return descend(params, fddp.pmean(grads))


def loss_times_ranks_once(params, x, y, group):
    total = fddp.psum(torch.tensor(float(len(x))))
    grads = grad(lambda p: group.size / total * row_loss(p, x, y))(params)
    return descend(params, fddp.pmean(grads))


# Boxes: rows that are objects


def box_loss(params, x, boxes):
    found = boxes.abs().sum(1, keepdim=True) > 0
    return ((x @ params["weight"] + params["bias"] - boxes).abs() * found).sum(), found.sum()


def own_boxes(params, x, boxes):
    def loss(p):
        total, count = box_loss(p, x, boxes)
        return total / count.clamp(min=1)

    return descend(params, fddp.pmean(grad(loss)(params)))


def all_boxes(params, x, boxes):
    count = fddp.psum(box_loss(params, x, boxes)[1].float()).clamp(min=1)
    grads = grad(lambda p: box_loss(p, x, boxes)[0] / count)(params)
    return descend(params, fddp.psum(grads))


def boxes_clamped_again(params, x, boxes):
    count = fddp.pmean(box_loss(params, x, boxes)[1].float())
    grads = grad(lambda p: box_loss(p, x, boxes)[0] / count.clamp(min=1))(params)
    return descend(params, fddp.pmean(grads))


def boxes_of_a_rank(params, x, boxes, group):
    count = fddp.pmean(box_loss(params, x, boxes)[1].float()).clamp(min=1 / group.size)
    grads = grad(lambda p: box_loss(p, x, boxes)[0] / count)(params)
    return descend(params, fddp.pmean(grads))


def few_boxes():
    x, boxes = make_rows()
    return x, boxes * (torch.arange(8) == 2)[:, None]


def some_boxes():
    x, boxes = make_rows()
    return x, boxes * torch.isin(torch.arange(8), torch.tensor([0, 3, 4, 7]))[:, None]


# Contrastive losses


def contrastive_loss(one, two):
    return cross_entropy(normalize(one) @ normalize(two).T / 0.1, torch.arange(len(one)))


def negatives_of_one_rank(params, x, y):
    def loss(p):
        return contrastive_loss(x @ p["weight"], y @ p["weight"])

    return descend(params, fddp.pmean(grad(loss)(params)))


def negatives_of_all_ranks(params, x, y):
    def loss(p):
        return contrastive_loss(rows_of_all(x @ p["weight"]), rows_of_all(y @ p["weight"]))

    return descend(params, fddp.pmean(grad(loss)(params)))  # the adjoint of a gather is a sum


def gathered_without_gradient(params, x, y, group):
    def loss(p):
        pair = [x @ p["weight"], y @ p["weight"]]
        return contrastive_loss(*(own_in_all(z, group) for z in pair))

    return descend(params, fddp.pmean(grad(loss)(params)))


def gathered_and_summed(params, x, y, group):
    def loss(p):
        pair = [x @ p["weight"], y @ p["weight"]]
        return contrastive_loss(*(own_in_all(z, group) for z in pair))

    return descend(params, fddp.psum(grad(loss)(params)))


def own_in_all(z, group):
    """Rows of all ranks, of which only this rank's have a derivative."""
    first = sum(fddp.all_gather(torch.tensor(len(z))).tolist()[: group.rank])
    rows = rows_of_all(z.detach())
    return torch.cat([rows[:first], z, rows[first + len(z) :]])


def correlation_loss(c):
    return (c - torch.eye(len(c), dtype=c.dtype)).square().sum()


def mean_of_correlations(params, x, y):
    def loss(p):
        one, two = x @ p["weight"], y @ p["weight"]
        return correlation_loss(fddp.pmean(one.T @ two / len(x)))

    return descend(params, fddp.pmean(grad(loss)(params)), 0.01)


def correlation_of_all(params, x, y):
    rows = fddp.psum(torch.tensor(float(len(x))))

    def loss(p):
        one, two = x @ p["weight"], y @ p["weight"]
        return correlation_loss(fddp.psum(one.T @ two) / rows)

    return descend(params, fddp.pmean(grad(loss)(params)), 0.01)


def sum_without_derivative(params, x, y):
    rows = fddp.psum(torch.tensor(float(len(x))))

    def loss(p):
        own = (x @ p["weight"]).T @ (y @ p["weight"])
        others = fddp.psum(own.detach()) - own.detach()
        return correlation_loss((own + others) / rows)

    return descend(params, fddp.pmean(grad(loss)(params)), 0.01)


def sum_without_derivative_summed(params, x, y):
    rows = fddp.psum(torch.tensor(float(len(x))))

    def loss(p):
        own = (x @ p["weight"]).T @ (y @ p["weight"])
        others = fddp.psum(own.detach()) - own.detach()
        return correlation_loss((own + others) / rows)

    return descend(params, fddp.psum(grad(loss)(params)), 0.01)


# Experts


def balance(params, x, counts, rows):
    """Loss that balances experts, of this rank's probabilities and of counts."""
    shares = (x @ params["router"]).softmax(1).sum(0) / rows
    return 3 * (shares * counts / rows).sum()


def chosen(params, x):
    return torch.bincount((x @ params["router"]).argmax(1), minlength=3).to(x.dtype)


def balanced_twice_divided(params, x, y, group):
    rows = fddp.psum(torch.tensor(float(len(x))))
    counts = fddp.psum(chosen(params, x))

    def loss(p):
        return group.size * row_loss(p, x, y) / rows + balance(p, x, counts, rows)

    return descend(params, fddp.pmean(grad(loss)(params)))


def balanced_over_all(params, x, y):
    rows = fddp.psum(torch.tensor(float(len(x))))
    counts = fddp.psum(chosen(params, x))
    grads = grad(lambda p: row_loss(p, x, y) / rows + balance(p, x, counts, rows))(params)
    return descend(params, fddp.psum(grads))


def balanced_by_own_counts(params, x, y):
    grads = mean_gradient(params, x, y)
    own = grad(lambda p: balance(p, x, chosen(p, x), len(x)))(params)
    return descend(params, fddp.tree_map(torch.add, grads, fddp.pmean(own)))


def router_params():
    generator = torch.Generator().manual_seed(4)
    return linear_params() | {"router": torch.randn(4, 3, generator=generator)}


# Batch normalisation


def normalized_by_rank(module, x, y):
    ddp = fddp.DistributedDataParallel(module, broadcast_buffers=False)
    rows = fddp.psum(torch.tensor(float(len(x))))
    ranks = fddp.psum(torch.tensor(1.0))
    module.zero_grad()
    (ranks / rows * (ddp(x) - y).square().sum()).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.1 * parameter.grad


def normalized_by_all(module, x, y):
    rows = fddp.psum(torch.tensor(float(len(x))))
    linear, norm, last = module

    def loss(p):
        z = functional_call(linear, {k: p[f"0.{k}"] for k in ("weight", "bias")}, (x,))
        mean = fddp.psum(z.sum(0)) / rows
        scale = (fddp.psum((z - mean).square().sum(0)) / rows + norm.eps).rsqrt()
        z = (z - mean) * scale * p["1.weight"] + p["1.bias"]
        z = functional_call(last, {k: p[f"2.{k}"] for k in ("weight", "bias")}, (z,))
        return fddp.psum((z - y).square().sum()) / rows

    grads = fddp.pmean(grad(loss)(dict(module.named_parameters())))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter -= 0.1 * grads[name]


def make_normalized():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)
        return torch.nn.Sequential(*layers)


def faults() -> list[Fault]:
    """All with new inputs."""
    params, rows, words = (linear_params(),), make_rows(), make_tokens()
    x, y = rows
    pairs = x, x + 0.5 * torch.cat([y, y[:, :1]], dim=1)
    return [
        Fault(
            "huggingface/transformers#34242",
            MEAN_OF_MEANS,
            *(mean_over_own_tokens, mean_over_all_tokens, params, words),
        ),
        Fault(
            "pytorch/torchtitan#2318",
            DIVIDED_TWICE,
            *(mean_of_shares, mean_over_all_tokens, params, words),
        ),
        Fault("pytorch/pytorch#37359", AVERAGED, mean_of_sums, sum_of_sums, params, rows),
        Fault(
            "neuralmagic/sparseml#135",
            SUMMED,
            *(loss_times_ranks, loss_times_ranks_once, params, rows),
        ),
        Fault(
            "huggingface/transformers#27990", OWN_COUNT, own_boxes, all_boxes, params, some_boxes()
        ),
        Fault(
            "LibreYOLO/libreyolo#567",
            DIVIDED_TWICE,
            *(boxes_clamped_again, boxes_of_a_rank, params, few_boxes()),
        ),
        Fault(
            "Lightning-Universe/lightning-bolts#179",
            OWN_STATISTICS,
            *(negatives_of_one_rank, negatives_of_all_ranks, params, pairs),
        ),
        Fault(
            "modelscope/ms-swift#10081",
            DIVIDED_TWICE,
            *(gathered_without_gradient, gathered_and_summed, params, pairs),
        ),
        Fault(
            "facebookresearch/vissl#230",
            MEAN_OF_MEANS,
            *(mean_of_correlations, correlation_of_all, params, pairs),
        ),
        Fault(
            "facebookresearch/barlowtwins#8",
            DIVIDED_TWICE,
            *(sum_without_derivative, sum_without_derivative_summed, params, pairs),
        ),
        Fault(
            "NVIDIA/Megatron-LM#3769",
            DIVIDED_TWICE,
            *(balanced_twice_divided, balanced_over_all, (router_params(),), rows),
        ),
        Fault(
            "pytorch/torchtitan#3000",
            OWN_COUNT,
            *(balanced_by_own_counts, balanced_over_all, (router_params(),), rows),
        ),
        Fault(
            "LibreYOLO/libreyolo#531",
            OWN_STATISTICS,
            *(normalized_by_rank, normalized_by_all, (make_normalized(),), rows),
        ),
    ]
