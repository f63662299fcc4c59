"""A rollout engine's side of `fcdp_compile.stream_state(model, changes=True)`, without fcdp.

examples/send_changes.py starts it and sends it a model that trains.
"""

from __future__ import annotations

import hashlib
from multiprocessing.connection import Connection

import torch
from torch import Tensor

Item = Tensor | tuple[Tensor, Tensor]
"""A whole tensor; or the indices and the new values of the elements that have changed."""


def apply(bucket: list[tuple[str, Item]], tensors: dict[str, Tensor]) -> None:
    """Give tensors the bits that the sender's tensors have."""
    for name, item in bucket:
        if isinstance(item, Tensor):
            tensors[name] = item
        else:
            indices, values = item
            tensors[name].view(-1)[indices] = values


def receive(connection: Connection) -> None:
    """Apply buckets until None; answer an empty bucket, the end of a stream, with a digest of all tensors."""
    tensors: dict[str, Tensor] = {}
    while (bucket := connection.recv()) is not None:
        apply(bucket, tensors)
        if not bucket:
            connection.send(digest(tensors))


def digest(tensors: dict[str, Tensor]) -> str:
    """Return a digest of names and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.cpu().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()
