"""Changes of a tensor, applied by the example's receiver: every bit arrives, in the fewest bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fcdp_compile
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.models.pretrained.exporting.changes import changes_of
from tests.distributed.beside import whole
from tests.examples.test_example_corpus import load_example

apply = load_example("receive_changes").apply

DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip

# Zeros, infinities, and quiet and signalling NaN with payloads, of all floating dtypes.
_SPECIAL = [0x0000, 0x8000, 0x7F80, 0x7C00, 0x7FC1, 0x7E01, 0x7F81, 0xFF81, 0xFC01, 0x7FF0, 0x7FF1]
_BITS = st.integers(0, 0xFFFF) | st.sampled_from(_SPECIAL)


def _tensor(bits: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor with these 16 bits in each element, as often as they fit; of a byte, the upper 8."""
    if dtype is torch.bool:
        return torch.tensor([b % 2 == 1 for b in bits], dtype=dtype)
    words = torch.tensor(bits, dtype=torch.int32).to(torch.uint16).view(-1, 1).repeat(1, 8)
    return words.view(torch.uint8)[:, -dtype.itemsize :].contiguous().view(dtype).view(-1)


def _same(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


@given(
    st.sampled_from(DTYPES),
    st.lists(_BITS, max_size=40),
    st.lists(st.tuples(st.integers(0, 39), _BITS), max_size=12)
    | st.just([(i, 7) for i in range(40)]),
    st.booleans(),
)
def test_every_bit_arrives(
    dtype: torch.dtype, bits: list[int], edits: list[tuple[int, int]], two: bool
) -> None:
    before, edited = _tensor(bits, dtype), list(bits)
    for i, b in edits:
        edited[i : i + 1] = [b] * (i < len(edited))
    after = _tensor(edited, dtype)
    if two and len(bits) % 2 == 0:
        before, after = before.view(2, -1), after.view(2, -1)
    changed = [i for i in range(len(bits)) if not _same(before.view(-1)[i], after.view(-1)[i])]
    found = changes_of(after, before)
    fewer = len(changed) * (4 + dtype.itemsize) < after.nbytes
    assert (found is not None) == fewer
    if found is not None:
        assert (found.indices.dtype, found.values.dtype) == (torch.int32, dtype)
        assert found.indices.tolist() == changed
        receiver = {"w": before.clone()}
        apply([("w", (found.indices, found.values))], receiver)
        assert _same(receiver["w"], after)


class _Receiver:
    """Asks for streams of changes and applies them; `whole` and `changed` are the names of the last one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors: dict[str, Tensor] = {}

    def take(self, **options: object) -> fcdp_compile.StateStream[object]:
        stream = fcdp_compile.stream_state(self.model, changes=True, **options)  # type: ignore[arg-type]
        self.whole, self.changed = set(), set()
        for bucket in stream:
            for name, item in bucket:
                is_whole = isinstance(item, Tensor)
                (self.whole if is_whole else self.changed).add(name)
                sent = item if isinstance(item, Tensor) else (item.indices, item.values)
                apply([(name, sent)], self.tensors)
        state = self.model.state_dict()
        assert self.tensors.keys() == state.keys()
        assert all(_same(self.tensors[name], whole(tensor)) for name, tensor in state.items())
        return stream


def test_a_base_is_what_was_acknowledged() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).bfloat16()
    fcdp_compile.shard(model)
    receiver = _Receiver(model)
    names = model.state_dict().keys()
    first = receiver.take()
    assert receiver.whole == names
    second = receiver.take()
    assert receiver.whole == names, "the first was not acknowledged"
    for late in (first, fcdp_compile.stream_state(model)):
        with pytest.raises(FcdpError, match="call it once the receiver has them"):
            late.acknowledge()
    second.acknowledge()
    with torch.no_grad():
        model[0].bias.zero_()
        next(model[1].parameters()).view(-1)[3] = -0.0
    list(fcdp_compile.stream_state(model))
    receiver.take(bucket_bytes=100).acknowledge()
    assert receiver.whole == {"0.bias"}
    left = fcdp_compile.stream_state(model, changes=True)
    for _ in left:
        break
    with pytest.raises(FcdpError, match="after all of its buckets"):
        left.acknowledge()
    left.close()
    receiver.take().acknowledge()
    assert receiver.whole == names, "a stream was left"
    fcdp_compile.stream_state(model, changes=True).close()
    receiver.take().acknowledge()
    assert receiver.whole == names, "a stream was closed"
    model[1].running_mean = model[1].running_mean.float()
    receiver.take().acknowledge()
    assert receiver.whole == {"1.running_mean"}, "its dtype has changed"
    with pytest.raises(ArgumentError, match="changes must be True or False, not 'yes'"):
        fcdp_compile.stream_state(model, changes="yes")  # type: ignore[call-overload]
