"""Weights that bitsandbytes has quantised and saved are read as they are, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fcdp_compile
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.quantised.weight import QuantisedWeight

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_type": "nf4"},
    "plain": {"quant_type": "nf4", "compress_statistics": False},
    "fp4": {"quant_type": "fp4", "compress_statistics": False, "quant_storage": torch.bfloat16},
    "halves": {"quant_type": "nf4"},
    "int8": {},
}
STATE = "0.weight.quant_state.bitsandbytes__nf4"


def _model(kind: str, device: str) -> nn.Module:
    layer: Any = bitsandbytes.nn.Linear8bitLt if kind == "int8" else bitsandbytes.nn.Linear4bit
    options = {"has_fp16_weights": False} if kind == "int8" else KINDS[kind]
    rows = 33 if kind == "halves" else 40  # 33 x 32 values end within a block of 64
    with torch.device("meta"):
        model = nn.Sequential(layer(32, rows, bias=True, **options), nn.Linear(rows, 3))
    if device == "cpu":
        torch.manual_seed(0)
        for i, each in enumerate(model):
            each.bias = nn.Parameter(torch.randn(each.bias.shape))
            values = torch.randn(each.out_features, each.in_features)
            old: Any = each.weight
            is_plain = i == 1
            each.weight = nn.Parameter(values) if is_plain else type(old)(values, **_made_as(old))
        model.to("cpu")
    return model.requires_grad_(False)


def _made_as(old: Any) -> dict[str, Any]:
    names = ["blocksize", "compress_statistics", "quant_type", "quant_storage", "module"]
    options = {n: vars(old)[n] for n in names if n in vars(old)}
    return options | {"requires_grad": False}


def _saved(folder: Path, kind: str) -> nn.Module:
    model = _model(kind, "cpu")
    save_file(model.state_dict(), folder / "model.safetensors")
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_read_as_it_was_saved(kind: str, tmp_path: Path) -> None:
    library = _saved(tmp_path, kind)
    values = torch.randn(4, 32)
    expected = library(values)
    loaded = fcdp_compile.shard(_model(kind, "meta"))
    fcdp_compile.load_pretrained(loaded, tmp_path)
    assert torch.equal(loaded(values), expected)
    fcdp_compile.shard(library)
    own, found = _tensors(library), _tensors(loaded)
    assert own.keys() == found.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor, found[name]), name
    of_library, of_loaded = (
        [m.recipe for m in model.modules() if isinstance(m, QuantisedWeight)]
        for model in (library, loaded)
    )
    assert of_library == of_loaded


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ("plain", r"has shape, block size and block size of the scales .*None\], but the model's"),
        ("fp4", "unexpected tensor '0.weight.quant_state.bitsandbytes__fp4' of model.safetensors"),
        (
            "int8",
            "'0.weight' of model.safetensors is quantised already, but not as the model's layer",
        ),
    ],
)
def test_a_weight_of_another_kind_is_refused(saved: str, told: str, tmp_path: Path) -> None:
    _saved(tmp_path, saved)
    model = fcdp_compile.shard(_model("nf4", "meta"))
    with pytest.raises(CheckpointError, match=told):
        fcdp_compile.load_pretrained(model, tmp_path)


def _without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _of_other_shape(tensors: dict[str, Tensor]) -> None:
    text = json.loads(bytes(tensors[STATE].tolist())) | {"shape": [20, 64]}
    tensors[STATE] = torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8)


def _damaged(tensors: dict[str, Tensor]) -> None:
    tensors[STATE] = tensors[STATE][:-3].clone()


def _short(tensors: dict[str, Tensor]) -> None:
    tensors["0.weight"] = tensors["0.weight"][:-8].clone()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_without("0.weight"), "missing tensor '0.weight.packed'"),
        (_without("0.weight.nested_absmax"), "missing tensor '0.weight.nested_absmax'"),
        (_without(STATE), "'0.weight' of model.safetensors is quantised already, but"),
        (_of_other_shape, r"has shape, .*\[\(20, 64\), 64, 256\], but the model's layer has"),
        (_damaged, "is described by text that cannot be read"),
        (_short, r"'0.weight' of model.safetensors is \(632, 1\) and \(20, 32\) in the model"),
    ],
)
def test_a_damaged_weight_is_refused(change: Any, told: str, tmp_path: Path) -> None:
    _saved(tmp_path, "nf4")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    model = fcdp_compile.shard(_model("nf4", "meta"))
    with pytest.raises(CheckpointError, match=told):
        fcdp_compile.load_pretrained(model, tmp_path)
