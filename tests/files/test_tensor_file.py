"""The safetensors library can read safetensors files written tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from fcdp_compile.models.files.safetensors_file import DTYPES, write_tensors


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
    write_tensors(path, tensors, metadata, lambda p: pieces.append(bytes(p)))
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
    write_tensors(tmp_path / "x", {"whole": whole, "turned": turned})
    found = load_file(tmp_path / "x")
    assert torch.equal(found["whole"], whole)
    assert torch.equal(found["turned"], turned)


def test_what_the_format_lacks_and_what_stays_incomplete_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'c' is torch\.complex64"):
        write_tensors(tmp_path / "dtype", {"c": torch.zeros(1, dtype=torch.complex64)})
    assert not (tmp_path / "dtype").exists()

    def full(piece: memoryview) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_tensors(tmp_path / "part", {"a": torch.zeros(2)}, wrote=full)
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "part")


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "x", {})
    assert (tmp_path / "x").read_text() == "mine"
