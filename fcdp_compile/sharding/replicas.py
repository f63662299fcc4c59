"""Make sure that every rank is about to shard the same model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from fcdp_compile.errors import ArgumentError
from fcdp_compile.files.text_diff import text_diff
from fcdp_compile.params.fingerprint import fingerprint
from fcdp_compile.params.mesh import Topology
from fcdp_compile.ranks.differences import first_other
from fcdp_compile.ranks.messages import broadcast_first
from fcdp_compile.runtime.collectives.collectives import Collectives

log = logging.getLogger(__name__)


def agree_on_replicas(
    topology: Topology,
    collectives: Collectives,
    description: Sequence[str],
    tensors: Sequence[tuple[str, Tensor]],
) -> None:
    """Compare the models that the ranks are about to shard; where values differ, take rank 0's, as DDP does.

    description: one line for each thing that must be the same.  tensors: parameters and buffers with names;
    if the descriptions are equal, all ranks have the same names.

    Raises: ValueError on every rank if the descriptions differ.
    """
    if topology.ranks == 1:
        return
    texts = collectives.exchange_texts("\n".join(description))
    if other := first_other(texts):
        names = ("rank 0", f"rank {other}")
        shown = "\n  ".join(text_diff(texts[0], texts[other], names, most=12))
        raise ArgumentError(
            f"ranks 0 and {other} are about to shard different models; build the same model with the same "
            f"settings on every rank. The differences:\n  {shown}"
        )
    if not tensors:
        return
    marks = torch.stack([fingerprint([t]).cpu() for _, t in tensors]).tolist()
    rows = collectives.agree(marks)
    differing = [
        (name, tensor)
        for (name, tensor), values in zip(tensors, zip(*rows, strict=True), strict=True)
        if len(set(values)) > 1
    ]
    for _, tensor in differing:
        on_host = tensor.detach().cpu().contiguous()
        assert topology.control is not None, "several processes have one"
        doing = "shard, as rank 0's values go to all ranks"
        broadcast_first(on_host.view(-1).view(torch.uint8), topology.control, doing)
        with torch.no_grad():
            tensor.detach().copy_(on_host)
    if differing and topology.position.rank == 0:
        log.warning(
            "%d of %d parameters and buffers differed between ranks (%s, …); rank 0's values were taken",
            len(differing),
            len(tensors),
            differing[0][0],
        )
