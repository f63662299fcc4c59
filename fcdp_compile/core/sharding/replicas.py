"""Make sure that every rank is about to shard the same model, on a GPU of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fcdp_compile.core.params.inner_cut import described, local_part
from fcdp_compile.core.params.mesh import Topology
from fcdp_compile.core.params.seals import fingerprint
from fcdp_compile.core.ranks.messages import broadcast_first, first_other
from fcdp_compile.core.sharding.refusals import Dtypes, warn_of_no_frozen, warn_of_torch
from fcdp_compile.devices import Device
from fcdp_compile.errors import ArgumentError
from fcdp_compile.models.files.text_diff import text_diff
from fcdp_compile.models.quantised.weight import quantised_weights
from fcdp_compile.runtime.collectives.collectives import Collectives, are_blocking
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.parameters.record import ParamRecord

log = logging.getLogger(__name__)


def agree_on_model(
    root: nn.Module,
    state: ShardedModel,
    records: Mapping[nn.Parameter, ParamRecord],
    ignored: Iterable[str],
    dtypes: Dtypes,
) -> None:
    """Make sure that all ranks shard the same model with the same values; where values differ, take rank 0's.

    records: of all parameters.  ignored: names of parameters that `shard` leaves alone.

    Raises: ArgumentError on every rank if ranks shard different models.
    """
    topology, collectives = state.topology, state.collectives
    if topology.everyone is None:
        return
    if topology.ranks > 1 and topology.node == topology.place == 0:
        warn_of_torch()
        warn_of_no_frozen((r.spec.strategy, p.requires_grad) for p, r in records.items())
    named = {r.spec.name: p for p, r in records.items()}
    tensors = [*named.items(), *root.named_buffers()]
    description = [
        f"param_dtype {dtypes.param}, reduce_dtype {dtypes.reduce}, buffer_dtype={dtypes.buffer}",
        *(f"{name}: ignored" for name in ignored),
        *(f"{r.spec.name}: {r.spec.strategy}{described(r.spec.inner)}" for r in records.values()),
        *(
            f"{name}: {t.dtype} {tuple(t.shape)}, requires_grad={t.requires_grad}"
            + (", on meta" if t.is_meta else "")
            for name, t in tensors
        ),
        *(f"{name}: {weight.meaning}" for name, weight in quantised_weights(root)),
    ]
    texts = collectives.exchange_texts("\n".join(description), topology.everyone)
    if other := first_other(texts):
        names = ("rank 0", f"rank {other}")
        shown = "\n  ".join(text_diff(texts[0], texts[other], names, most=12))
        raise ArgumentError(
            f"ranks 0 and {other} are about to shard different models; build the same model with the same "
            f"settings on every rank. The differences:\n  {shown}"
        )
    present = [(name, local_part(t)) for name, t in tensors if not t.is_meta]
    if topology.tp is not None:
        parts = {
            r.spec.name
            for r in records.values()
            if r.spec.inner is not None and r.spec.inner.dim is not None
        }
        whole = [(name, t) for name, t in present if name not in parts]
        _refuse_different(root, whole, topology, collectives)
    differing = _take_first(present, topology.control, collectives)
    if differing and topology.position.rank == 0:
        log.warning(
            "%d of %d parameters and buffers differed between ranks (%s, …); rank 0's values were taken",
            len(differing),
            len(present),
            differing[0],
        )


def _refuse_different(
    root: nn.Module,
    tensors: Sequence[tuple[str, Tensor]],
    topology: Topology,
    collectives: Collectives,
) -> None:
    """Refuse whole parameters and buffers that differ within a "tp" group, and random numbers that will.

    Raises: ArgumentError on every rank.
    """
    drops = any(isinstance(m, nn.Dropout) and m.p for m in root.modules())
    seed = torch.initial_seed() % 2**62 if drops else 0
    marks = [seed, *(int(fingerprint([t])) for _, t in tensors)]
    rows = collectives.agree(marks, group=topology.everyone)
    for group, (first, *others) in topology.among_sharers(rows):
        for i, mark in enumerate(first):
            if all(row[i] == mark for row in others):
                continue
            if i == 0:
                raise ArgumentError(
                    f'ranks {group} share parameters ("tp") but have different seeds for dropout; '
                    "call torch.manual_seed with one seed for the ranks of a group"
                )
            raise ArgumentError(
                f'{tensors[i - 1][0]!r} differs between ranks {group}, which share parameters ("tp"); give '
                "them equal values, or say which part of it a rank has with fcdp_compile.declare_part"
            )


def _take_first(
    tensors: Sequence[tuple[str, Tensor]],
    group: dist.ProcessGroup | None,
    collectives: Collectives,
) -> list[str]:
    """Give all ranks of a group the first rank's values of what differs, as DDP does; returns its names."""
    if not tensors or group is None:
        return []
    marks = torch.stack([fingerprint([t]).cpu() for _, t in tensors]).tolist()
    rows = collectives.agree(marks, group=group)
    differing = [
        (name, tensor)
        for (name, tensor), values in zip(tensors, zip(*rows, strict=True), strict=True)
        if len(set(values)) > 1
    ]
    doing = "shard, as rank 0's values go to all ranks"
    for _, tensor in differing:
        on_host = tensor.detach().cpu().contiguous()
        broadcast_first(on_host.view(-1).view(torch.uint8), group, lambda: doing)
        with torch.no_grad():
            tensor.detach().copy_(on_host)
    return [name for name, _ in differing]


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
