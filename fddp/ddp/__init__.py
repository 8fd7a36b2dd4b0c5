"""The whole of torch's `DistributedDataParallel`, as a thin holder over the engine."""

from fddp.ddp.wrapper import DistributedDataParallel as DistributedDataParallel
