"""Whether a module's parameters are still those that were hooked.

Modules are compared by identity alone, in compiled code: dictionaries that hold the same objects as
before cost a few nanoseconds an entry, so that every forward can look.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor
from torch.nn import Module, Parameter

from fddp.ddp.arguments import managed
from fddp.native import extension

Change = Literal["none", "swapped", "changed"]


class ParameterWatch:
    """Looks after the parameters of one module.

    Args:
        module: whose parameters.
        ignored: names of those that are left alone.

    Attributes:
        params: the trainable ones by name, as they were when they were last looked at in full.
        latest: the same, in one dictionary that follows every look.
    """

    def __init__(self, module: Module, ignored: frozenset[str]) -> None:
        self._module = module
        self._ignored = ignored
        self.latest: dict[str, Parameter] = {}
        self.find_replaced()

    def find_replaced(self) -> Mapping[str, Parameter]:
        """Takes the parameters as they are now."""
        modules = list(self._module.modules())
        self._tables = [m._parameters for m in modules]
        self._buffers = [m._buffers for m in modules]
        children = [m._modules for m in modules]
        self._seen: Any = extension.load().CachedStructure([*self._tables, *children])
        every = managed(self._module, self._ignored)
        self._trainable = [param for param in every.values() if param.requires_grad]
        self._frozen = [param for param in every.values() if not param.requires_grad]
        self.params = {name: param for name, param in every.items() if param.requires_grad}
        self.latest.clear()
        self.latest.update(self.params)
        return self.params

    def change(self) -> Change:
        """What has happened since: "swapped" while `functional_call` has put tensors of its own in
        the parameters' places; parameters that were frozen since are no change."""
        if not self._seen.matches():
            there = (entry for table in self._tables for entry in table.values())
            is_swapped = any(not isinstance(e, Parameter) for e in there if isinstance(e, Tensor))
            return "swapped" if is_swapped else "changed"
        return "changed" if any(param.requires_grad for param in self._frozen) else "none"

    @property
    def all_frozen(self) -> bool:
        """Whether no parameter requires a gradient for now."""
        return not any(param.requires_grad for param in self._trainable)

    @property
    def has_buffers(self) -> bool:
        """Whether any module has a buffer, ignored ones included."""
        return any(self._buffers)
