"""DDP's messages about parameters without a gradient.

fddp synchronises such steps completely. It keeps the errors, with DDP's phrases, for scripts and
tools that rely on them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch.distributed as dist

_UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. "
)
_STATIC = "this is not compatible with static_graph set to True."

NONE_UNUSED_WARNING = (
    "find_unused_parameters=True was specified in DDP constructor, but did not find any unused "
    "parameters in the forward pass. fddp finds them without the flag and at no cost; leave it "
    "out to have unused parameters reported"
)


def unused_error(
    unused: Collection[str], order: Sequence[str], rank: int, elsewhere: Collection[str]
) -> str:
    """Return the error of a forward pass after a step with unused parameters.

    Args:
        unused: names of parameters without a gradient on this rank.
        order: all names, in the order of registration.
        rank: this rank.
        elsewhere: names of parameters that only other ranks did not use.
    """
    return (
        f"{_UNFINISHED}This error indicates that your module has parameters that were not used "
        f"in producing loss. You can enable unused parameter detection by passing the keyword "
        f"argument `find_unused_parameters=True` to `fddp.DistributedDataParallel`, "
        f"and by making sure all `forward` function outputs participate in calculating loss. "
        f"Gradients of that step were synchronised nevertheless: fddp needs no flag for it, and "
        f"only repeats DDP's error.\n"
        f"{without_gradient(unused, order, rank)}{_elsewhere(elsewhere)}"
    )


def static_unused_error(unused: Collection[str], order: Sequence[str], rank: int) -> str:
    """Return the same error for a graph that was declared static."""
    return (
        f"{_UNFINISHED}This error indicates that your training graph has changed in this "
        f"iteration, e.g., one parameter is used in first iteration, but then got unused in the "
        f"second iteration. {_STATIC}\n{without_gradient(unused, order, rank)}"
    )


def static_used_error(used: Collection[str]) -> str:
    """Return the error of a step with parameters that the first step did not use."""
    return (
        f"Your training graph has changed in this iteration, e.g., one parameter is unused in "
        f"first iteration, but then got used in the second iteration. {_STATIC} Newly used: "
        f"{', '.join(sorted(used))}"
    )


def without_gradient(unused: Collection[str], order: Sequence[str], rank: int) -> str:
    """List the parameters by number, as in DDP, and by name."""
    if not unused:
        return f"Parameter indices which did not receive grad for rank {rank}: none"
    numbers = " ".join(str(i) for i, name in enumerate(order) if name in unused)
    names = ", ".join(name for name in order if name in unused)
    text = (
        f"Parameter indices which did not receive grad for rank {rank}: {numbers}\n"
        f"Parameters which did not receive grad for rank {rank}: {names}"
    )
    if dist.get_debug_level() != dist.DebugLevel.OFF:
        return text
    return (
        f"{text}\n In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to "
        f"either INFO or DETAIL to log them in the step in which they are unused"
    )


def _elsewhere(names: Collection[str]) -> str:
    return f"\nWithout a gradient on other ranks: {', '.join(sorted(names))}" if names else ""
