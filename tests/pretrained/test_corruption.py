"""A damaged checkpoint is refused with its file's name, or loads exactly the file's new values."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fcdp_compile
from fcdp_compile.errors import CheckpointError

INDEX = "model.safetensors.index.json"
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("count", torch.tensor([1, 2]))


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return fcdp_compile.shard(Small())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    state = {name: torch.ones_like(value) * 7 for name, value in Small().state_dict().items()}
    parts = [{n: t for n, t in state.items() if ("first" in n) == one} for one in (True, False)]
    for file, part in zip(FILES, parts, strict=False):
        save_file(part, folder / file, metadata={"format": "pt"})
    places = {n: file for file, part in zip(FILES, parts, strict=False) for n in part}
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": places}, indent=2)
    )
    return folder


@st.composite
def _damages(draw: st.DrawFn) -> tuple[str, str, float, int]:
    """File, kind of damage, position as a fraction of that kind's bytes, and a byte or a number of bytes."""
    kinds = ["truncate", "extend", "flip length", "flip header", "flip data", "flip any"]
    where = draw(st.floats(0, 1, exclude_max=True))
    return (
        draw(st.sampled_from(FILES)),
        draw(st.sampled_from(kinds)),
        where,
        draw(st.integers(1, 255)),
    )


def _damaged(raw: bytes, kind: str, where: float, byte: int) -> bytes:
    header = int.from_bytes(raw[:8], "little")
    spans = {
        "flip length": (0, 8),
        "flip header": (8, 8 + header),
        "flip data": (8 + header, len(raw)),
    }
    start, stop = spans.get(kind, (0, len(raw)))
    if not 0 <= start < stop <= len(raw):
        start, stop = 0, len(raw)
    at = start + int(where * (stop - start))
    if kind == "truncate":
        return raw[:at]
    if kind == "extend":
        return raw + bytes([byte]) * byte
    return raw[:at] + bytes([raw[at] ^ byte]) + raw[at + 1 :]


@given(damage=_damages())
@example(damage=(FILES[0], "flip length", 0.99, 0x7F))
@example(damage=(FILES[1], "truncate", 0.0, 1))
@settings(max_examples=200)
def test_damage_is_refused_or_loaded_as_it_stands(
    model: nn.Module,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    damage: tuple[str, str, float, int],
) -> None:
    file, kind, where, byte = damage
    copy = tmp_path_factory.mktemp("damaged")
    for name in FILES:
        shutil.copy(folder / name, copy)
    path = copy / file
    path.write_bytes(_damaged(path.read_bytes(), kind, where, byte))
    before = _values(model)
    refused = _refusal(model, copy)
    expected = before
    if refused is None:
        expected = {**load_file(copy / FILES[0]), **load_file(copy / FILES[1])}
    else:
        assert str(copy) in refused
        assert file in refused or "missing tensor" in refused
    shutil.rmtree(copy)
    after = _values(model)
    assert after.keys() == expected.keys()
    for name, value in after.items():
        bits = value.reshape(-1).view(torch.uint8)
        assert torch.equal(bits, expected[name].to(value.dtype).reshape(-1).view(torch.uint8))


def _refusal(model: nn.Module, folder: Path) -> str | None:
    try:
        fcdp_compile.load_pretrained(model, folder)
    except CheckpointError as error:
        return str(error)
    return None


def _file(header: object, data: int = 0, length: int | None = None) -> bytes:
    raw = json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(data)


def _entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HUGE = 2**50


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "truncated"),
        (b"\xff" * 8, "truncated"),
        (_file({}, length=HUGE), "truncated"),
        (_file({"scale": _entry([HUGE], 0, 4 * HUGE)}), "truncated"),
        (_file({"scale": _entry([HUGE, HUGE], 0, 4)}, 4), "needs"),
        (_file({"scale": _entry([1], 0, 4)}, 5), "1 bytes follow"),
        (_file({"scale": _entry([1], 4, 8)}, 8), "gap"),
        (_file({"a": _entry([2], 0, 8), "b": _entry([1], 4, 8)}, 8), "overlaps"),
        (_file({"scale": _entry([-1], 0, 4)}, 4), "shape"),
        (_file({"scale": _entry([True], 0, 4)}, 4), "shape"),
        (_file({"scale": _entry([1], 4, 0)}, 4), "byte range"),
        (_file({"scale": _entry([1], 0, 4, "F4")}, 4), "dtype 'F4'"),
        (_file({"scale": {"dtype": "F32"}}, 4), "does not give"),
        (_file([1]), "not a JSON object"),
        (_file({}, length=2)[:8] + b'{"a":1,"a":2}', "damaged"),
        ((5000).to_bytes(8, "little") + b"[" * 5000, "damaged"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "damaged"),
    ],
)
def test_what_a_header_claims_is_checked_first(
    model: nn.Module, tmp_path: Path, raw: bytes, says: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=says) as raised:
            fcdp_compile.load_pretrained(model, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    assert str(path) in str(raised.value)
