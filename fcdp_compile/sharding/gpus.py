"""Compare the GPUs of all ranks of a mesh before they are used."""

from __future__ import annotations

import torch.distributed as dist

from fcdp_compile.devices import Device
from fcdp_compile.errors import ArgumentError
from fcdp_compile.params.mesh import Topology
from fcdp_compile.runtime.collectives.collectives import Collectives, are_blocking


def agree_on_gpus(topology: Topology, collectives: Collectives, device: Device) -> int | None:
    """The bytes of the smallest GPU of all ranks; None without GPUs.  All ranks must call this.

    All ranks plan for the smallest GPU, so that they place the same buckets on the device.

    Raises: ValueError on every rank if NCCL would have to connect ranks that use the same GPU.
    """
    if topology.ranks > 1 and topology.device_type == "cpu":
        return None
    # The index does not tell: each rank may see another GPU as its only one (CUDA_VISIBLE_DEVICES).
    mine = device.identity()
    rank = dist.get_rank() if topology.ranks > 1 else 0
    texts = collectives.exchange_texts(
        "" if mine is None else f"{mine} {device.total_bytes()} {rank}"
    )
    # In groups that only echo, all texts are this rank's own.
    found = [text.split() for text in dict.fromkeys(texts) if text]
    uuids = [uuid for uuid, *_ in found]
    shared = next((uuid for uuid in uuids if uuids.count(uuid) > 1), None)
    if shared is not None and not are_blocking(topology, device):
        count = uuids.count(shared)
        raise ArgumentError(
            f"{count} ranks use one GPU ({shared}), which NCCL does not connect; call torch.cuda.set_device "
            "with LOCAL_RANK before the model is moved to the GPU, and start as many ranks as a node has GPUs"
        )
    return min((int(size) for _, size, _ in found), default=None)
