"""The files of a checkpoint, and their faults, all reported at once."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.pretrained.folder import INDEX, SINGLE, open_checkpoint

A, B = "a.safetensors", "b.safetensors"


def _index(folder: Path, places: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def _two_files(folder: Path) -> None:
    save_file({"x": torch.zeros(2)}, folder / A)
    save_file({"y": torch.zeros(3)}, folder / B)


def test_one_file_goes_before_an_index_and_each_can_be_named(tmp_path: Path) -> None:
    _two_files(tmp_path)
    _index(tmp_path, {"x": A, "y": B})
    assert set(open_checkpoint(tmp_path).tensors) == {"x", "y"}
    assert set(open_checkpoint(tmp_path / INDEX).tensors) == {"x", "y"}
    assert set(open_checkpoint(str(tmp_path / A)).tensors) == {"x"}
    save_file({"z": torch.zeros(1)}, tmp_path / SINGLE)
    assert set(open_checkpoint(tmp_path).tensors) == {"z"}


def test_links_are_followed(tmp_path: Path) -> None:
    """The hub's cache keeps files as links."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"x": torch.zeros(2)}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / SINGLE).symlink_to("../blobs/0123")
    assert set(open_checkpoint(tmp_path / "snapshot").tensors) == {"x"}


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (
            {"x": A, "y": "c.safetensors"},
            r"c\.safetensors, which .* names, cannot be read: No such",
        ),
        ({"x": A}, None),
        ({"x": A, "z": A, "y": B}, r"index.json says 'z' is in a\.safetensors, which lacks it"),
        ({"x": B, "y": B}, r"b\.safetensors, which lacks it"),
        ({"x": A, "y": "../b.safetensors"}, "which is not a safetensors file within its folder"),
        ({"x": A, "y": "..\\b.safetensors"}, "which is not a safetensors file within its folder"),
        ({"x": A, "y": "/etc/passwd"}, "which is not a safetensors file within its folder"),
        ({"x": A, "y": "C:b.safetensors"}, "which is not a safetensors file within its folder"),
        ({"x": A, "y": "b\0.safetensors"}, "which is not a safetensors file within its folder"),
        ({"x": A, "y": "b.bin"}, "is a pickle"),
        ({"x": 3}, "no weight_map"),
        ([A], "no weight_map"),
    ],
)
def test_an_index_is_not_believed(tmp_path: Path, places: object, says: str | None) -> None:
    _two_files(tmp_path)
    _index(tmp_path, places)
    if says is None:
        assert set(open_checkpoint(tmp_path).tensors) == {"x"}
        return
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path)


def test_a_file_with_more_than_its_index_says(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2), "more": torch.zeros(1)}, tmp_path / A)
    _index(tmp_path, {"x": A})
    with pytest.raises(CheckpointError, match=r"has 'more', which .* does not list"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    _two_files(tmp_path)
    save_file({"x": torch.zeros(2), "y": torch.zeros(3)}, tmp_path / B)
    _index(tmp_path, {"x": A, "y": B})
    with pytest.raises(CheckpointError, match=r"'x' is in two files, a\.safetensors and b\."):
        open_checkpoint(tmp_path)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / A).write_bytes(b"short")
    _index(tmp_path, {"x": A, "y": B} | {f"t{i}": f"f{i}.safetensors" for i in range(40)})
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(tmp_path)
    assert all(text in str(raised.value) for text in ("a.safetensors is", "b.safetensors", "f0."))
    assert str(raised.value).endswith("and 22 more")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model.bin.index.json"])
def test_pickles_are_refused_and_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(pytest.fail))
    with pytest.raises(CheckpointError, match="is a pickle: reading it would run any code"):
        open_checkpoint(tmp_path)
    if not name.endswith(".json"):
        with pytest.raises(CheckpointError, match="is a pickle"):
            open_checkpoint(tmp_path / name)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(
        CheckpointError, match=r"give huggingface_hub\.snapshot_download\('a/b-1.5B'\)"
    ):
        open_checkpoint("a/b-1.5B")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"name one of its files.*adapter_model"):
        open_checkpoint(tmp_path)
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match="is not a file"):
        open_checkpoint(tmp_path)


def test_the_digest_tells_versions_of_one_model_apart(tmp_path: Path) -> None:
    digests = set()
    for value in (0.0, 0.0, 1.0):
        save_file({"x": torch.full((1000,), value)}, tmp_path / SINGLE)
        digests.add(open_checkpoint(tmp_path).digest)
    assert len(digests) == 2
