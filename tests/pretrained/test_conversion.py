"""Conversions of sources equal the results of Transformers' own converters on tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Conv3dToLinear,
    ConversionOps,
    Interleave,
    LinearToConv3d,
    MergeModulelist,
    PermuteForRope,
    Split,
    Transpose,
    WeightConverter,
)

from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.pretrained.conversion import Target, converted
from fcdp_compile.models.pretrained.folder import read_header
from fcdp_compile.models.pretrained.huggingface import reading_order
from fcdp_compile.models.pretrained.source import Files, in_file

MODEL = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
)
ATTENTION = "model.layers.0.self_attn"
EXPERTS = ["experts.*.w1.weight", "experts.*.w3.weight"]


def _tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


CASES: dict[str, tuple[WeightConverter, dict[str, list[Tensor]], str]] = {
    "experts": (
        WeightConverter(EXPERTS, "experts.gate_up", [MergeModulelist(0), Concatenate(1)]),
        {pattern: _tensors((3, 4), (3, 4), (3, 4)) for pattern in EXPERTS},
        "model.layers.0.experts.gate_up",
    ),
    "one list": (
        WeightConverter("experts.*.w2", "experts.down", [MergeModulelist(0), Transpose(-1, 1)]),
        {"experts.*.w2": _tensors((3, 4), (3, 4))},
        "experts.down",
    ),
    "fused": (
        WeightConverter(["q", "k", "v"], "qkv", [Concatenate(-1)]),
        {p: _tensors((5, n)) for p, n in zip("qkv", (4, 2, 2), strict=True)},
        "layers.1.qkv.weight",
    ),
    "chunks": (
        WeightConverter("qkv", ["q_proj", "k_proj", "v_proj"], [Chunk(dim=0)]),
        {"qkv": _tensors((12, 5))},
        f"{ATTENTION}.q_proj.weight",
    ),
    "split": (
        WeightConverter("qkv", ["q_proj", "k_proj", "v_proj"], [Split(dim=0)]),
        {"qkv": _tensors((16, 8))},
        f"{ATTENTION}.q_proj.weight",
    ),
    "transposed": (
        WeightConverter("a", "b", [Transpose(0, 2)]),
        {"a": _tensors((2, 3, 4))},
        "x.b",
    ),
    "transposed if need be": (
        WeightConverter("old", "down_proj", [Transpose(check_dims=True)]),
        {"old": _tensors((8, 12))},
        "model.layers.0.mlp.down_proj.weight",
    ),
    "rotary": (
        WeightConverter("wq", "q_proj", [PermuteForRope()]),
        {"wq": _tensors((8, 8))},
        f"{ATTENTION}.q_proj.weight",
    ),
    "rotary of some": (
        WeightConverter(
            ["wq", "wv"], "qv", [PermuteForRope(permute_layer_names=["wq"]), Concatenate(0)]
        ),
        {"wq": _tensors((8, 8)), "wv": _tensors((8, 8))},
        "qv",
    ),
    "interleaved": (
        WeightConverter("a", "b", [Interleave(dim=0)]),
        {"a": _tensors((6, 5))},
        "b",
    ),
    "to linear": (
        WeightConverter("a", "b", [Conv3dToLinear(2, (1, 2, 2))]),
        {"a": _tensors((6, 2, 1, 2, 2))},
        "b",
    ),
    "to convolution": (
        WeightConverter("a", "b", [LinearToConv3d(2, (1, 2, 2))]),
        {"a": _tensors((6, 8))},
        "b",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_conversion_is_transformers_own(case: str, tmp_path: Path) -> None:
    converter, collected, name = CASES[case]
    stored = {f"{p}.{i}": t for p, some in collected.items() for i, t in enumerate(some)}
    save_file(stored, tmp_path / "some.safetensors")
    leaves = read_header(tmp_path / "some.safetensors").tensors
    target = Target(name=name, base=MODEL, shape_of=_shape_of)
    sources = converted(
        converter,
        {p: [in_file(leaves[f"{p}.{i}"]) for i in range(len(t))] for p, t in collected.items()},
        target,
    )
    for pattern, some in collected.items():
        for tensor in some:
            converter.add_tensor(name, pattern, pattern, lambda tensor=tensor: tensor)
    theirs = converter.convert(name, model=MODEL, config=MODEL.config)
    assert sources.keys() == theirs.keys()
    for key, source in sources.items():
        whole = theirs[key][0] if isinstance(theirs[key], list) else theirs[key]
        assert source.shape == tuple(whole.shape)
        # The second half along each dimension, as a rank would read it.
        for dim in range(whole.ndim):
            start = whole.shape[dim] // 2
            part = whole.narrow(dim, start, whole.shape[dim] - start)
            out = torch.empty_like(part, memory_format=torch.contiguous_format)
            with Files() as files:
                source.fill(out, [start if d == dim else 0 for d in range(whole.ndim)], files)
            assert torch.equal(out, part)


def _shape_of(name: str) -> tuple[int, ...] | None:
    parameters = dict(MODEL.named_parameters())
    return tuple(parameters[name].shape) if name in parameters else None


class Unheard(ConversionOps):
    def convert(self, input_dict: object, **options: object) -> object:
        raise AssertionError("never called")


def test_an_unknown_operation_is_refused() -> None:
    converter = WeightConverter("a", "b", [Unheard()])
    target = Target(name="b", base=MODEL, shape_of=_shape_of)
    with pytest.raises(CheckpointError, match="operation 'Unheard', which cannot be done in parts"):
        converted(converter, {"a": []}, target)


def test_an_operation_of_one_name_from_elsewhere_is_refused() -> None:
    other = type("Transpose", (Unheard,), {})
    converter = WeightConverter("a", "b", [other()])
    target = Target(name="b", base=MODEL, shape_of=_shape_of)
    with pytest.raises(CheckpointError, match="cannot be done in parts"):
        converted(converter, {"a": []}, target)


def test_tensors_are_read_in_transformers_order() -> None:
    from transformers.core_model_loading import dot_natural_key

    names = ["e.10.w", "e.2.w", "e.w", "shard_11", "shard_2", "e2.x", "2.e", "e.10.a", "e"]
    assert sorted(names, key=reading_order) == sorted(names, key=dot_natural_key)
