"""Line parameters up in a bucket's flat buffer and take them out again: tensor arithmetic only.

The same functions run eagerly and are traced into the lowered graphs.  Buffers (S = slot elements of the
bucket, see `layout` [Note: slots]):

    shards -> home buffer [S]        pack_home       no copy for one full slot of the right dtype
    full buffer [G*S] -> parameters  unpack_full     no copy for a bucket of one evenly cut parameter
    gradients -> buffer [G*S]        pack_grads
    reduced buffer [S] -> shards     unpack_grads    elements after the slot are padding

If matrices have home nodes (`layout` [Note: home nodes]), a home buffer has the slots of the matrices at home
on this node, and the others have g slots of all matrices, in the order of their home nodes: [g*S].

[Note: narrow sums] Gradients in bf16 or fp16 travel in their own dtype: every rank receives the parts of all
others (an all-to-all, as many bytes as a reduce-scatter), sums them in fp32 and rounds once.  So each of the
two levels of a reduction rounds once, however many ranks there are.  With unit roundoff u of the dtype (2^-8
for bf16, 2^-11 for fp16), the error of an averaged gradient is at most (2u + u^2) times the average of the
ranks' magnitudes, plus fp32's own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fcdp_compile.core.params.layout import Box, ParamLayout


def rows_first(tensor: Tensor, layout: ParamLayout) -> Tensor:
    """A tensor of the parameter's shape with its sharded dimension in front; a view."""
    return tensor if layout.dim in (None, 0) else tensor.movedim(layout.dim, 0)


def rows_back(rows: Tensor, layout: ParamLayout, count: int) -> Tensor:
    """Undo `rows_first` for a flat tensor of `count` rows; contiguous."""
    if layout.dim is None:
        return rows.reshape(())
    others = [s for i, s in enumerate(layout.shape) if i != layout.dim]
    tensor = rows.reshape([count, *others])
    return tensor if layout.dim == 0 else tensor.movedim(0, layout.dim).contiguous()


def _padded(flat: Tensor, elements: int) -> Tensor:
    missing = elements - flat.numel()
    return flat if not missing else torch.cat([flat, flat.new_zeros(missing)])


def _joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)


def pack_home(
    shards: Sequence[Tensor], layouts: Sequence[ParamLayout], dtype: torch.dtype, node: int
) -> Tensor:
    """Line up the home shards of a rank of this node as one slot of shape [S] in `dtype`."""
    return _joined(
        [
            _padded(rows_first(shard.to(dtype), layout).reshape(-1), layout.elements_of(node))
            for shard, layout in zip(shards, layouts, strict=True)
        ],
        0,
    )


def home_slots(
    out: Tensor, shards: Sequence[Tensor], layouts: Sequence[ParamLayout], node: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """How to write into `out` [S] what `pack_home` makes anew for a graph: targets, sources, padding.

    Targets and padding are views of `out`; the padding must become zero.
    """
    parts = [rows_first(shard, layout) for shard, layout in zip(shards, layouts, strict=True)]
    slots = out.split([layout.elements_of(node) for layout in layouts])
    used = [slot[: p.numel()].view(p.shape) for slot, p in zip(slots, parts, strict=True)]
    rest = [slot[p.numel() :] for slot, p in zip(slots, parts, strict=True)]
    return used, parts, [r for r in rest if r.numel()]


def unpack_full(full: Tensor, layouts: Sequence[ParamLayout]) -> list[Tensor]:
    """Take the parameters, contiguous and of their full shapes, out of the gathered buffer [G*S]."""
    slots = full.view(layouts[0].slots, -1)
    params, offset = [], 0
    for layout in layouts:
        mine = slots.narrow(1, offset, layout.slot_elements)
        offset += layout.slot_elements
        if layout.dim is None:
            params.append(mine[0].reshape(()))
            continue
        if layout.is_even:
            flat = mine.reshape(-1)
        else:
            flat = _joined(_used(mine, layout) or [mine[0, :0]], 0)
        # If slots have one element, `reshape` returns a strided view.
        params.append(rows_back(flat.contiguous(), layout, layout.shape[layout.dim]))
    return params


def _used(slots: Tensor, layout: ParamLayout) -> list[Tensor]:
    """The slots [G, slot elements] of a parameter without their padding, flat, in order."""
    used, first = [], 0
    for run in layout.runs:
        if run.rows:
            rows = slots.narrow(0, first, run.slots).narrow(1, 0, run.rows * layout.row_elements)
            used.append(rows.reshape(-1))
        first += run.slots
    return used


def pack_grads(
    grads: Sequence[Tensor], layouts: Sequence[ParamLayout], dtype: torch.dtype
) -> Tensor:
    """Line up full gradients as G slots, [G*S] in `dtype`: the owner of slot i receives it."""
    return _joined(
        [_grad_slots(g.to(dtype), layout) for g, layout in zip(grads, layouts, strict=True)], 1
    ).reshape(-1)


def padded(flat: Tensor, multiple: int) -> Tensor:
    """A flat tensor with zeros added at its end, so that its length is a multiple of `multiple`."""
    return _padded(flat, -(-flat.numel() // multiple) * multiple)


def _grad_slots(grad: Tensor, layout: ParamLayout) -> Tensor:
    if layout.dim is None:
        return grad.reshape(1, 1).expand(layout.ranks, 1)
    rows = rows_first(grad, layout)
    if layout.is_even:
        return rows.reshape(layout.slots, layout.slot_elements)
    slots, start = [], 0
    for run in layout.runs:
        used = run.rows * layout.row_elements
        taken = rows.narrow(0, start, run.slots * run.rows).reshape(run.slots, used)
        if missing := layout.slot_elements - used:
            taken = torch.cat([taken, taken.new_zeros(run.slots, missing)], 1)
        slots.append(taken)
        start += run.slots * run.rows
    return _joined(slots, 0)


def unpack_grads(
    reduced: Tensor,
    layouts: Sequence[ParamLayout],
    local_shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    node: int,
) -> list[Tensor]:
    """Take the gradient shards of a rank of this node out of its reduced slot [S].

    local_shapes, dtypes: those of the shards.
    """
    shards, offset = [], 0
    for layout, shape, dtype in zip(layouts, local_shapes, dtypes, strict=True):
        flat = reduced.narrow(0, offset, math.prod(shape))
        offset += layout.elements_of(node)
        count = shape[layout.dim] if layout.dim is not None else 1
        shards.append(rows_back(flat, layout, count).to(dtype))
    return shards


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a dtype is bf16 or fp16, so that fp32 has all of its values and takes more precise sums."""
    return dtype in (torch.bfloat16, torch.float16)


def narrow_sum_bytes(dtype: torch.dtype, elements: int, size: int) -> int:
    """Extra bytes that a rank needs to reduce elements over `size` ranks: others' parts, and the sum."""
    return elements * dtype.itemsize + -(-elements // size) * 4 if is_narrow(dtype) else 0


def block_of(tensor: Tensor, first: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A view of a block of a tensor."""
    for dim, (start, size) in enumerate(zip(first, shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def take_boxes(part: Tensor, whole: Tensor, boxes: Sequence[Box]) -> None:
    """Fill a part of a whole tensor from the whole tensor."""
    for at, inside, shape in boxes:
        block_of(part, inside, shape).copy_(block_of(whole, at, shape))


def put_boxes(part: Tensor, whole: Tensor, boxes: Sequence[Box]) -> None:
    """Copy a part of a whole tensor to its place there."""
    for at, inside, shape in boxes:
        block_of(whole, at, shape).copy_(block_of(part, inside, shape))


def rows_of(whole: Tensor, layout: ParamLayout, node: int, place: int) -> Tensor:
    """A view of the rows of a whole parameter that the rank at this node and place has as its home shard."""
    if layout.dim is None:
        return whole
    return whole.narrow(layout.dim, *layout.local_rows(node, place))
