"""A damaged checkpoint is refused with its file's name and changes nothing, or loads the saved values."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpointing.small import Small, data_file
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.checkpointing.format.record import (
    FORMAT,
    CheckpointRecord,
    read_record,
    seal,
)

Damage = Callable[[Path, st.DataObject], None]


def _flip(path: Path, data: st.DataObject, start: int, stop: int) -> None:
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(start, stop - 1), "byte")
    count = data.draw(st.integers(1, min(16, stop - at)), "bytes")
    mask = data.draw(st.binary(min_size=count, max_size=count).filter(any), "mask")
    for i in range(count):
        raw[at + i] ^= mask[i]
    path.write_bytes(raw)


def _header_end(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def _length(folder: Path, data: st.DataObject) -> None:
    _flip(data_file(folder), data, 0, 8)


def _header(folder: Path, data: st.DataObject) -> None:
    _flip(data_file(folder), data, 8, _header_end(data_file(folder)))


def _values(folder: Path, data: st.DataObject) -> None:
    path = data_file(folder)
    _flip(path, data, _header_end(path), path.stat().st_size)


def _truncated(folder: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([data_file(folder), folder / "checkpoint.json"]), "file")
    raw = path.read_bytes()
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 2), "length")])


def _extended(folder: Path, data: st.DataObject) -> None:
    with data_file(folder).open("ab") as file:
        file.write(data.draw(st.binary(min_size=1, max_size=9), "tail"))


def _record(folder: Path, data: st.DataObject) -> None:
    path = folder / "checkpoint.json"
    _flip(path, data, 0, path.stat().st_size)


def _missing(folder: Path, data: st.DataObject) -> None:
    data_file(folder).unlink()


def _of_another(folder: Path, data: st.DataObject) -> None:
    """An equal model, with equal sizes and header, but other values."""
    other = Small(9)
    other.train(2)
    other.save(folder.parent / "other")
    shutil.copyfile(data_file(folder.parent / "other"), data_file(folder))
    shutil.rmtree(folder.parent / "other")


DAMAGES: dict[str, Damage] = {
    "length of the header": _length,
    "header": _header,
    "values": _values,
    "truncated": _truncated,
    "extended": _extended,
    "record": _record,
    "missing": _missing,
    "swapped": _of_another,
}
NAMES = (r"checkpoint.json", "rank-00000.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Small]:
    job = Small(1)
    job.train(3)
    folder = tmp_path_factory.mktemp("saved") / "good"
    job.save(folder)
    return folder, job


@pytest.mark.parametrize("kind", DAMAGES)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage_is_refused_or_harmless(
    saved: tuple[Path, Small],
    kind: str,
    data: st.DataObject,
) -> None:
    good, job = saved
    bad = good.parent / "bad"
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(good, bad)
    DAMAGES[kind](bad, data)
    reader = Small(2)
    before = reader.state()
    loaded, refusal = None, ""
    try:
        loaded = reader.load(bad)
    except CheckpointError as error:
        refusal = str(error)
    if loaded is None:
        assert any(name in refusal for name in NAMES), refusal
        assert reader.state() == before, "nothing was changed"
    else:
        assert kind == "record", "white space, at most"
        assert loaded.step == 1
        assert reader.state()["tensors"] == job.state()["tensors"]
        assert reader.state()["scheduler"] == job.state()["scheduler"]


def _rewrite(folder: Path, change: Callable[[CheckpointRecord], CheckpointRecord]) -> None:
    """Forge a record with a correct checksum."""
    record = change(read_record(folder))
    (folder / "checkpoint.json").write_text(FORMAT.to_json(seal(record)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: replace(r, id="../../../../etc"), "id: is not 16"),
        (lambda r: replace(r, files=()), "files: are 0"),
        (lambda r: replace(r, block_bytes=0), "block_bytes: is 0"),
        (lambda r: replace(r, nodes=2**40), "files: are 1"),
        (lambda r: replace(r, files=(replace(r.files[0], blocks=()),)), "blocks: are 0"),
        (lambda r: replace(r, tensors=r.tensors * 2), "twice"),
        (lambda r: replace(r, values=r.values * 2), "neither once"),
        (
            lambda r: replace(r, tensors=(replace(r.tensors[0], files=(7,)), *r.tensors[1:])),
            "do not name one file of the checkpoint for each part",
        ),
        (
            lambda r: replace(
                r, tensors=tuple(replace(t, rows=tuple(n + 1 for n in t.rows)) for t in r.tensors)
            ),
            "do not match the shape",
        ),
        (
            lambda r: replace(
                r, tensors=tuple(replace(t, shape=(2**50, *t.shape[1:])) for t in r.tensors)
            ),
            "shape",
        ),
    ],
)
def test_a_record_that_claims_the_impossible_is_refused(
    saved: tuple[Path, Small],
    tmp_path: Path,
    change: Callable[[CheckpointRecord], CheckpointRecord],
    message: str,
) -> None:
    shutil.copytree(saved[0], tmp_path / "forged")
    _rewrite(tmp_path / "forged", change)
    with pytest.raises(CheckpointError, match=message):
        Small(2).load(tmp_path / "forged")


def test_a_header_that_claims_more_than_the_file_has_allocates_nothing(
    saved: tuple[Path, Small], tmp_path: Path
) -> None:
    """Also with correct checksums: a tensor of 2**60 elements in the optimizer's state."""
    shutil.copytree(saved[0], tmp_path / "forged")
    path = data_file(tmp_path / "forged")
    raw = path.read_bytes()
    end = _header_end(path)
    header = json.loads(raw[8:end])
    for entry in header.values():
        entry["shape"] = [2**60]
        entry["data_offsets"] = [0, 2**60 * 4]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
    sums = _sums(path)
    _rewrite(tmp_path / "forged", lambda r: replace(r, files=(sums,)))
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors is damaged: "):
        Small(2).load(tmp_path / "forged")


def test_a_record_that_says_something_twice_is_refused(
    saved: tuple[Path, Small], tmp_path: Path
) -> None:
    shutil.copytree(saved[0], tmp_path / "forged")
    path = tmp_path / "forged/checkpoint.json"
    text = path.read_text()
    assert '"best": 1.5' in text
    path.write_text(_sealed(text.replace('"best": 1.5', '"best": 1.5, "best": 2.5')))
    with pytest.raises(CheckpointError, match=r"values\[\d+\]\.tree.*best: appears twice"):
        Small(2).load(tmp_path / "forged")


@pytest.mark.timeout(60)
def test_a_huge_record_is_refused_without_looking_at_its_values(
    saved: tuple[Path, Small], tmp_path: Path
) -> None:
    """25 MB of empty lists, which once took two minutes; also with a correct checksum."""
    shutil.copytree(saved[0], tmp_path / "huge")
    path = tmp_path / "huge/checkpoint.json"
    lists = "[" + "[], " * 6_250_000 + "[]]"
    text = path.read_text().replace('"best": 1.5', f'"best": {lists}')
    assert len(text) > 25e6
    path.write_text(text)
    with pytest.raises(CheckpointError, match="checksum: does not match the rest"):
        read_record(tmp_path / "huge")
    text = text.replace("[], " * 6_000_000, "").replace('"nodes": 1', '"nodes": 3')
    path.write_text(_sealed(text))
    with pytest.raises(CheckpointError, match="files: are 1, but 3 ranks have written"):
        read_record(tmp_path / "huge")


def _sealed(text: str) -> str:
    """A record's text with its own checksum."""
    before, mark, after = text.partition('"checksum": "')
    after = after[64:]
    checksum = hashlib.sha256((before + mark + after).encode()).hexdigest()
    return before + mark + checksum + after


def _sums(path: Path):  # type: ignore[no-untyped-def]
    from fcdp_compile.models.checkpointing.format.disk import BlockSums

    sums = BlockSums()
    sums.add(memoryview(path.read_bytes()))
    return sums.file()


def test_nothing_is_ever_unpickled(saved: tuple[Path, Small], tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path / "pickled")
    torch.save({"a": 1}, data_file(tmp_path / "pickled"))
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors has"):
        Small(2).load(tmp_path / "pickled")


def test_other_tools_read_the_data(saved: tuple[Path, Small]) -> None:
    from safetensors.torch import load_file

    tensors = load_file(data_file(saved[0]))
    assert torch.equal(tensors["model.first.weight"], saved[1].model.first.weight.detach())
