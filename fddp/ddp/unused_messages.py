"""What DDP says about parameters that received no gradient.

fddp synchronises such steps in full. The errors are kept for scripts that rely on them; their
phrases are those by which users and tools know them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch.distributed as dist

_UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. "
)
_STATIC = "this is not compatible with static_graph set to True."


def unused_error(
    unused: Collection[str], order: Sequence[str], rank: int, elsewhere: Collection[str]
) -> str:
    """The error of a forward pass that follows a step with unused parameters.

    Args:
        unused: names of those without a gradient on this rank.
        order: all names, in the order of their registration.
        rank: this rank.
        elsewhere: names of those that only other ranks did not use.
    """
    return (
        f"{_UNFINISHED}This error indicates that your module has parameters that were not used "
        f"in producing loss. You can enable unused parameter detection by passing the keyword "
        f"argument `find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, "
        f"and by making sure all `forward` function outputs participate in calculating loss. "
        f"Gradients of that step were synchronised all the same: fddp needs no flag for it, and "
        f"only repeats DDP's error.\n"
        f"{without_gradient(unused, order, rank)}{_elsewhere(elsewhere)}"
    )


def static_unused_error(unused: Collection[str], order: Sequence[str], rank: int) -> str:
    """The same where the graph had been declared static."""
    return (
        f"{_UNFINISHED}This error indicates that your training graph has changed in this "
        f"iteration, e.g., one parameter is used in first iteration, but then got unused in the "
        f"second iteration. {_STATIC}\n{without_gradient(unused, order, rank)}"
    )


def static_used_error(used: Collection[str]) -> str:
    """The error of a step with parameters that the first one of a static graph did not use."""
    return (
        f"Your training graph has changed in this iteration, e.g., one parameter is unused in "
        f"first iteration, but then got used in the second iteration. {_STATIC} Newly used: "
        f"{', '.join(sorted(used))}"
    )


def none_unused_warning() -> str:
    """What is said once where unused parameters were announced and there are none."""
    return (
        "find_unused_parameters=True was specified in DDP constructor, but did not find any unused "
        "parameters in the forward pass. fddp finds them without the flag and at no cost; leave it "
        "out to have unused parameters reported"
    )


def without_gradient(unused: Collection[str], order: Sequence[str], rank: int) -> str:
    """The parameters by name and, as DDP has them, by number."""
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
        f"either INFO or DETAIL to print out information about which particular parameters did not "
        f"receive gradient on this rank as part of this error"
    )


def _elsewhere(names: Collection[str]) -> str:
    return f"\nWithout a gradient on other ranks: {', '.join(sorted(names))}" if names else ""
