"""Connection of the communicators of some ranks, one for each device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fddp.native import extension
from fddp.transport.c10d.communicator import Communicator, CommunicatorSpec
from fddp.transport.c10d.gloo import GlooCommunicator
from fddp.transport.c10d.nccl import NcclCommunicator
from fddp.transport.c10d.rendezvous import connect_with_abort
from fddp.transport.c10d.shared_memory import ShmCommunicator
from fddp.transport.group_backend import backend_of


class GroupCommunicator(Communicator):
    """Any other backend, through `new_group`, a collective call of all members."""

    def __init__(self, spec: CommunicatorSpec, backend: str) -> None:
        members = dist.get_process_group_ranks(spec.group)
        group = dist.new_group(
            [members[rank] for rank in spec.ranks],
            timeout=timedelta(seconds=spec.timeout_s),
            backend=backend,
            use_local_synchronization=len(spec.ranks) < dist.get_world_size(),
        )
        super().__init__(group, spec.rank, spec.ranks)

    def _end(self, backend: Any, *, failed: bool) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(backend)


def connect(spec: CommunicatorSpec, backends: dict[str, str]) -> dict[str, Communicator]:
    """Create one communicator for each distinct backend; return them by device type."""
    names = set(backends.values())
    if not names <= {"fddp", "gloo", "nccl"}:
        config = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        return dict.fromkeys(backends, GroupCommunicator(spec, config))
    by_name: dict[str, Communicator] = {}
    if "fddp" in names:
        by_name["fddp"] = _connect_fddp(spec)
    if "gloo" in names:
        by_name["gloo"] = GlooCommunicator(spec)
    if "nccl" in names:
        by_name["nccl"] = NcclCommunicator(spec)
    return {device: by_name[backend] for device, backend in backends.items()}


def _connect_fddp(spec: CommunicatorSpec) -> Communicator:
    backend = backend_of(spec.group, torch.device("cpu"))
    if not isinstance(backend, extension.compiled.ShmBackend):
        return GlooCommunicator(spec)  # the ranks do not share memory
    part, _ = connect_with_abort(
        lambda store: backend.split(store, spec.ranks, spec.timeout_s),
        spec.store,
        spec.timeout_s,
        spec.check_peers,
    )
    return ShmCommunicator(part, spec.rank, spec.ranks, of_all_hosts=True)
