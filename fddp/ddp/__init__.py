"""torch's `DistributedDataParallel` over fddp's engine."""

from fddp.ddp.wrapper import DistributedDataParallel as DistributedDataParallel
