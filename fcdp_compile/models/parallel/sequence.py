"""The part of a batch of sequences that one rank trains on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from fcdp_compile.core.params.mesh import topology_of
from fcdp_compile.core.ranks.inner_mesh import CP, cp_of, data_mesh
from fcdp_compile.core.ranks.messages import first_other
from fcdp_compile.errors import ArgumentError

NO_TARGET = -100
"""The label of positions without a target, as in Transformers."""


def sequence_part(batch: Mapping[str, Any], mesh: DeviceMesh | None) -> dict[str, Any]:
    """Cut a batch for a model after `context_parallel`: `model(**sequence_part(batch, mesh)).loss`.

    Averaged over all ranks, that loss is the mean over all targets of all ranks' batches, whatever their
    numbers.  All ranks of the mesh must call it; ranks that share sequences must have the same batch.

    batch: `input_ids` [B, S], and if there are any, `labels` [B, S], `attention_mask` [B, S] (0: padding) and
    `position_ids` [B or 1, S], which begin again where another packed sequence begins; what collators compute
    from these for packed sequences (`cu_seq_lens_q`, `seq_idx`, …) is left out.
    mesh: from `make_mesh`, with "cp" or without.

    Returns: `input_ids`, `position_ids`, `labels` and `shift_labels` [B, S/c], where S is rounded up to a
    multiple of c; `num_items_in_batch`: targets of all ranks / ranks; `sequence_ids` [B, S]: which sequence a
    token belongs to, -1 for padding, or None where causality suffices on all ranks; `only_trailing`: whether
    nothing but padding at the end makes `sequence_ids` necessary.

    Raises: ArgumentError for other entries or shapes, and on every rank if ranks that share sequences have
    different batches.
    """
    ids = _checked(batch)
    ranks = cp_of(mesh)
    place = mesh.get_local_rank(CP) if mesh is not None and ranks > 1 else 0
    length = -(-ids.shape[1] // ranks) * ranks
    more = (0, length - ids.shape[1])
    positions = batch.get("position_ids")
    mask = batch.get("attention_mask")
    # With a mask, Transformers takes no positions for the beginning of another sequence, either.
    is_packed = positions is not None and mask is None and bool(_begins(positions).any())
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    sequences = torch.zeros_like(ids, dtype=torch.int64)
    if is_packed:
        sequences = pad(_begins(positions.expand(len(ids), -1)).cumsum(1), (1, 0))
    if mask is not None:
        sequences = torch.where(mask.bool(), sequences, -1)
    sequences = pad(sequences, more, value=-1)
    is_padded = bool((sequences == -1).any())
    is_trailing = not is_packed and bool((sequences[:, 1:] <= sequences[:, :-1]).all())
    targets = None
    if (labels := batch.get("labels")) is not None:
        targets = pad(labels[:, 1:], (0, 1 + more[1]), value=NO_TARGET)
    first, last = (place * length // ranks, (place + 1) * length // ranks)
    own = None if targets is None else targets[:, first:last]
    count = 0 if own is None else int((own != NO_TARGET).sum())
    items, masked, inner, world = _everywhere(
        batch, [count, is_padded or is_packed, not is_trailing], mesh
    )
    part: dict[str, Any] = {
        "input_ids": pad(ids, more)[:, first:last].contiguous(),
        "position_ids": _extended(positions, more[1])[:, first:last].contiguous(),
        "sequence_ids": sequences if masked else None,
        "only_trailing": not inner,
    }
    if own is not None:
        part["labels"] = part["shift_labels"] = own.contiguous()
        part["num_items_in_batch"] = torch.tensor(items / world, device=ids.device)
    return part


_ENTRIES = ("input_ids", "labels", "attention_mask", "position_ids")
_OF_POSITIONS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What FlashAttention and convolutions need besides; it says where positions begin again."""


def _checked(batch: Mapping[str, Any]) -> Tensor:
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.shape[1]:
        raise ArgumentError("sequence_part needs input_ids of shape [batch, tokens] in the batch")
    for name, value in batch.items():
        if name in _OF_POSITIONS and batch.get("position_ids") is not None:
            continue
        if name not in _ENTRIES:
            raise ArgumentError(
                f"sequence_part does not know how to cut {name!r}; give it only {', '.join(_ENTRIES)}"
            )
        sizes = [ids.shape, (1, ids.shape[1])] if name == "position_ids" else [ids.shape]
        if value is not None and tuple(value.shape) not in map(tuple, sizes):
            raise ArgumentError(
                f"{name} has shape {tuple(value.shape)}, but input_ids have {tuple(ids.shape)}; give both "
                "the same shape"
            )
    return ids


def _begins(positions: Tensor) -> Tensor:
    """[B, S-1]: whether a token after the first begins another packed sequence."""
    return positions[:, 1:] != positions[:, :-1] + 1


def _extended(positions: Tensor, count: int) -> Tensor:
    """Positions with more of them at the end."""
    return torch.cat(
        [positions, positions[:, -1:] + 1 + torch.arange(count, device=positions.device)], 1
    )


def _everywhere(batch: Mapping[str, Any], mine: list[int], mesh: DeviceMesh | None) -> list[int]:
    """The sums of what each rank says, and the number of ranks.

    Raises: ArgumentError on every rank if ranks that share sequences have different batches.
    """
    if mesh is None:
        return [*mine, 1]
    said = torch.tensor([_fingerprint(batch), *mine], device="cpu")
    control = topology_of(data_mesh(mesh)).control
    assert control is not None, "a mesh has process groups"
    found = [torch.empty_like(said) for _ in range(dist.get_world_size(control))]
    dist.all_gather(found, said, group=control)
    told = torch.stack(found)
    shared = (
        dist.get_process_group_ranks(mesh.get_group(CP)) if cp_of(mesh) > 1 else [dist.get_rank()]
    )
    sharing = [dist.get_group_rank(control, rank) for rank in shared]
    if (other := first_other(told[sharing, 0].tolist())) is not None:
        raise ArgumentError(
            f'ranks 0 and {other} of a "cp" group have different batches, but share their sequences; let '
            "samplers count groups, not ranks: num_replicas = ranks / cp, rank = rank // cp"
        )
    return [*told[:, 1:].sum(0).tolist(), len(told)]


def _fingerprint(batch: Mapping[str, Any]) -> int:
    """A number that differs for other values, and for values in another order."""
    digest = hashlib.sha256()
    for name in _ENTRIES:
        if (value := batch.get(name)) is not None:
            digest.update(f"{name} {tuple(value.shape)}".encode())
            digest.update(value.detach().long().cpu().numpy().tobytes())
    return int.from_bytes(digest.digest()[:7], "big")
