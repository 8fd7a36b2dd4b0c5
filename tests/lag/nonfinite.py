"""Policies for non-finite numbers on a device, in steps whose report is read later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import fddp
from fddp.native.pack import flag_nonfinite
from fddp.tree.pytree import tree_map
from tests.lag.rank import (
    CAP,
    SMALL,
    Rank,
    gradients,
    mean_square,
    means,
    module,
    module_means,
    placed,
    slow,
)
from tests.support.endings import ending
from tests.support.models import batch, mlp, mlp_loss

LATER: dict[str, Any] = {"report": "next", **SMALL}
ALGORITHMS = "all_reduce", "reduce_scatter"


def _spoiled(rank: Rank, tree: Any, name: str = "layer1") -> Any:
    """The tree, with a late leaf, in which rank 1 has a NaN."""
    late = slow(tree[name]["bias"])
    if rank.number == 1:
        late[3] = float("nan")
    return {**tree, name: {**tree[name], "bias": late}}


def _gradients(rank: Rank, number: int) -> Any:
    return torch.func.grad(mlp_loss)(rank.put(mlp()), rank.put(batch(rank.number, number)))


def _check_flag(rank: Rank, flag: Tensor | None, expected: float) -> None:
    assert flag is not None
    rank.check({"flag": flag.double()}, {"flag": torch.tensor(expected).double()})


@contextmanager
def _opened(
    rank: Rank, nonfinite: Any, algorithm: Any
) -> Iterator[tuple[fddp.GradSync, Callable[[Any], Any], Callable[[Any], Any]]]:
    """A `GradSync`, its call that takes a step, and the one that makes whole leaves of results."""
    options: dict[str, Any] = {"algorithm": algorithm, "nonfinite": nonfinite, **LATER}
    with fddp.GradSync(rank.put(mlp()), group=rank.group, **options) as sync:
        if algorithm == "all_reduce":
            yield sync, sync, lambda results: results
        else:
            yield sync, sync.reduce_scatter, sync.all_gather


def skipped_later(rank: Rank) -> None:
    """Zeros and a flag in place of a NaN of one rank, of whole leaves and of shards."""
    zeros = tree_map(torch.zeros_like, mlp())
    for algorithm in ALGORITHMS:
        with _opened(rank, "skip", algorithm) as (sync, take, make_whole):
            for number in range(3):
                for tree, expected, flag in (
                    (_spoiled(rank, _gradients(rank, number)), zeros, 1.0),
                    (_gradients(rank, number), means(number), 0.0),
                ):
                    found = take(tree)
                    rank.overwrite_free()
                    kept = sync.found_inf
                    rank.check(make_whole(found), expected)
                    _check_flag(rank, kept, flag)


def raised_later(rank: Rank) -> None:
    """The error for a NaN of one rank, with the next call, from steps on a stream of their own."""
    side = torch.Stream(device=rank.device)
    for algorithm in ALGORITHMS:
        with _opened(rank, "raise", algorithm) as (sync, take, _):
            for number in range(3):
                grads = _gradients(rank, number)
                side.wait_stream(torch.accelerator.current_stream(rank.device))
                with side:
                    take(_spoiled(rank, grads))
                found = ending(sync.check)
                assert found.kinds[0] == "NonFiniteError", found
                assert "in leaf 'layer1.bias'. They come" in found.text, found
                with side:
                    take(grads)
                assert ending(sync.check).kinds[0] == "no error"
                torch.accelerator.current_stream(rank.device).wait_stream(side)


def decided_for_two_devices(rank: Rank) -> None:
    """A NaN in a leaf of one device, for which leaves of another are zero, too. The other may be
    the CPU."""
    zeros = tree_map(torch.zeros_like, mlp())
    for there, policy in product([rank.other, torch.device("cpu")], ["skip", "raise"]):
        put = partial(placed, first=rank.device, last=there)
        options: dict[str, Any] = {"nonfinite": policy, **LATER}
        with fddp.GradSync(put(mlp()), group=rank.group, **options) as sync:
            for number, name in enumerate(["layer1", "layer3"]):
                result = sync(_spoiled(rank, put(means(number)), name))
                if policy == "skip":
                    rank.check(result, zeros)
                else:  # first: other checks wait for the device
                    assert f"in leaf '{name}.bias'. They" in ending(sync.check).text
                _check_flag(rank, sync.found_inf, 1.0)
                rank.check(sync(put(means(number))), means(number))
                _check_flag(rank, sync.found_inf, 0.0)


def flagged(rank: Rank) -> None:
    """Flags of tensors of several dtypes, large, empty, complex and not contiguous."""
    nan, large = float("nan"), torch.full((3, 2), 3e38)
    host = [large, torch.empty(0), torch.complex(large, large), large.double() * 1e100]
    host += [
        torch.tensor([1.0, x]).to(dtype)
        for x in (nan, 1.0)
        for dtype in (torch.half, torch.bfloat16)
    ]
    host += [torch.tensor([[1.0, nan], [2.0, 3.0]]).T[0], torch.tensor([1.0 + nan * 1j]), large]
    flags, order = flag_nonfinite(rank.put(host), rank.device)
    there = dict(zip(order, flags.cpu().tolist(), strict=True))
    flags, order = flag_nonfinite(host, torch.device("cpu"))
    assert there == dict(zip(order, flags.tolist(), strict=True))
    assert there == {n: float(not tensor.isfinite().all()) for n, tensor in enumerate(host)}


def failed_before_flags(rank: Rank) -> None:
    """A step under a policy that one rank fails before it has leaves, while the other one takes its
    results: both send a flag of these."""
    for algorithm in ALGORITHMS:
        with _opened(rank, "skip", algorithm) as (sync, take, make_whole):
            for number in range(2):
                grads = _gradients(rank, number)
                take(grads)
                ending(partial(take, {} if rank.number == 1 else grads))
                found = ending(sync.check)
                assert found.kinds[0] == "PeerError", found
                rank.check(make_whole(take(grads)), means(number))


def wrapped_skips_later(rank: Rank) -> None:
    """Zero gradients and a flag of a wrapped module, also where they are views of buckets."""
    for views in (False, True):
        net = module(rank.device)
        ddp = fddp.DistributedDataParallel(
            net,
            process_group=rank.group,
            bucket_cap_mb=CAP,
            gradient_as_bucket_view=views,
            report="next",
            nonfinite="skip",
        )
        for number in range(4):
            is_bad = number % 2 == 1
            ddp.zero_grad()
            loss = mean_square(ddp, rank.put(batch(rank.number, number)))
            if is_bad and rank.number == 1:
                loss = slow(loss) * float("nan")
            loss.backward()
            expected = module_means(number, mean_square)
            if is_bad:
                expected = tree_map(torch.zeros_like, expected)
            rank.check(gradients(net), expected)
            _check_flag(rank, ddp.found_inf, float(is_bad))
            assert ddp.skipped is is_bad
