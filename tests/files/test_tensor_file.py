"""The safetensors library can read safetensors files written tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from fcdp_compile.models.files.safetensors_writer import DTYPES, TensorFileWriter, TensorMeta


def meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(dtype=tensor.dtype, shape=tuple(tensor.shape))


@settings(max_examples=50)
@given(
    sizes=st.lists(
        st.tuples(
            st.sampled_from(sorted(DTYPES, key=str)),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=6,
    ),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
def test_safetensors_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[tuple[torch.dtype, list[int]]],
    metadata: dict[str, str],
) -> None:
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    tensors = {
        f"t{i}": (torch.rand(shape) * 100).to(dtype) for i, (dtype, shape) in enumerate(sizes)
    }
    pieces: list[bytes] = []
    with TensorFileWriter(
        path, {n: meta(t) for n, t in tensors.items()}, metadata, lambda p: pieces.append(bytes(p))
    ) as file:
        for name, tensor in tensors.items():
            file.write(name, tensor)
    found = load_file(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        raw = [t.reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*raw)
    with safe_open(path, "pt") as opened:
        assert (opened.metadata() or {}) == metadata
    assert b"".join(pieces) == path.read_bytes()


def test_a_tensor_of_several_pieces_and_one_that_is_not_contiguous(tmp_path: Path) -> None:
    whole = torch.arange(2**23 + 3, dtype=torch.float32)  # two pieces of 16 MiB and a rest
    turned = torch.arange(12.0).view(3, 4).T
    with TensorFileWriter(tmp_path / "x", {"whole": meta(whole), "turned": meta(turned)}) as file:
        file.write("whole", whole)
        file.write("turned", turned)
    found = load_file(tmp_path / "x")
    assert torch.equal(found["whole"], whole)
    assert torch.equal(found["turned"], turned)


def test_what_is_not_as_announced_is_refused(tmp_path: Path) -> None:
    a, b = torch.zeros(2), torch.zeros(3)
    announced = {"a": meta(a), "b": meta(b)}
    with pytest.raises(ValueError, match="the next tensor is 'a', not 'b'"):  # noqa: SIM117
        with TensorFileWriter(tmp_path / "order", announced) as file:
            file.write("b", b)
    with pytest.raises(ValueError, match="header says"):  # noqa: SIM117
        with TensorFileWriter(tmp_path / "shape", announced) as file:
            file.write("a", b)
    with pytest.raises(ValueError, match="'b' was never written"):  # noqa: SIM117
        with TensorFileWriter(tmp_path / "missing", announced) as file:
            file.write("a", a)
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"'c' is torch\.complex64"):
        TensorFileWriter(tmp_path / "dtype", {"c": meta(torch.zeros(1, dtype=torch.complex64))})
    assert not (tmp_path / "dtype").exists()


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        TensorFileWriter(tmp_path / "x", {})
    assert (tmp_path / "x").read_text() == "mine"
