"""Compile the codecs of a plan's buckets with the compiler of the graphs' segments.

The backend hands the compiled kernels to the runtime's codecs.  Equal shapes are compiled once (`Compute`),
so repeated layers cost no more than one layer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fcdp_compile import ops
from fcdp_compile.backend.compute import Compute
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.collectives.quantize import Codec, decode_blocks, encode_blocks
from fcdp_compile.strategy import Algorithm
from fcdp_compile.torch_compat import FakeTensorMode, detect_fake_mode
from fcdp_compile.torch_compat.autograd import without_modes

log = logging.getLogger(__name__)


def compile_codecs(
    lowered: GraphModule,
    buckets: Mapping[int, BoundBucket],
    compute: Compute,
    device: torch.device,
) -> None:
    """Compile the codecs for the steps of a graph and for refreshing its buckets.

    With ATen's kernels there is nothing to compile.
    """
    if not compute.is_inductor:
        return
    with without_modes():
        explicit = [n for n in lowered.graph.nodes if n.target in ops.EXPLICIT]
        for number in dict.fromkeys(n.kwargs.get("bucket") for n in explicit):
            if isinstance(number, int):
                _compile_weights(buckets[number], compute, device)
        for node in lowered.graph.find_nodes(op="call_function", target=ops.inter_reduce_scatter):
            bound, params = buckets[node.kwargs["bucket"]], node.kwargs["params"]
            if (codec := bound.cache.codecs.of_gradients(params)) is not None:
                dtype, rows = getattr(torch, bound.bucket.reduce_dtype), bound.bucket.nodes
                wide = torch.promote_types(dtype, torch.float32)
                compile_codec(codec, compute, device, encodes=True, rows=rows, dtype=dtype)
                compile_codec(codec, compute, device, encodes=False, rows=rows, dtype=wide)


def _compile_weights(bound: BoundBucket, compute: Compute, device: torch.device) -> None:
    if (codec := bound.cache.codecs.of_weights) is None:
        return
    bucket = bound.bucket
    dtype = getattr(torch, bucket.dtype)
    compile_codec(codec, compute, device, encodes=True, rows=1, dtype=dtype)
    # The slots of a node shard are decoded at once, and HO-Ring also decodes each home shard alone.
    counts = {bucket.nodes, 1} if bucket.algorithm is Algorithm.HO_RING else {bucket.nodes}
    for rows in counts:
        compile_codec(codec, compute, device, encodes=False, rows=rows, dtype=dtype)


def compile_codec(
    codec: Codec,
    compute: Compute,
    device: torch.device,
    *,
    encodes: bool,
    rows: int,
    dtype: torch.dtype,
) -> None:
    """Compile one direction of a codec for this many rows and this dtype, unless it needs no kernel."""
    kernels = codec.encoders if encodes else codec.decoders
    if (rows, dtype) in kernels or not codec.is_regular or not codec.elements:
        return

    def encode(values: Tensor, *book: Tensor) -> tuple[Tensor, ...]:
        return encode_blocks(codec, values, *book)

    def decode(scales: Tensor, data: Tensor, *book: Tensor) -> tuple[Tensor, ...]:
        return (decode_blocks(codec, scales, data, *book, dtype=dtype),)

    function = encode if encodes else decode
    # Equal on every rank, and from a separate generator: compiling must not change users' random numbers.
    numbers = torch.Generator().manual_seed(0)
    values = torch.randn(rows, codec.blocks, codec.coding.block, generator=numbers, device="cpu")
    values, book = values.to(device, dtype), codec.book(device)
    sent = encode_blocks(codec, values, *book)
    inputs = [values, *book] if encodes else [*sent, *book]
    kernel = compute.compile(_trace(function, inputs, compute))
    # Checked before use: with torch 2.13 on CPUs, Inductor can silently leave elements out of a loop.
    expected = decode_blocks(codec, *sent, *book, dtype=torch.float32)
    found = kernel(list(inputs))
    decoded = (
        decode_blocks(codec, found[0], found[1], *book, dtype=torch.float32)
        if encodes
        else found[0].float()
    )
    if torch.allclose(decoded, expected, rtol=2.0**-7, atol=0.0):
        kernels[rows, dtype] = kernel
    else:
        _warn_once(str(device))


@functools.cache
def _warn_once(device: str) -> None:
    log.warning(
        "Inductor compiles the quantisation kernels wrongly for %s, so ATen's kernels run instead",
        device,
    )


def _trace(function: Callable[..., Any], like: Iterable[Tensor], compute: Compute) -> GraphModule:
    # Within AOTAutograd, Inductor uses the fake mode of its trace.
    with detect_fake_mode() or FakeTensorMode():
        values = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in like]
        # Inductor wants a graph without writes in place.
        return make_fx(torch.func.functionalize(function), compute.decompositions())(*values)
