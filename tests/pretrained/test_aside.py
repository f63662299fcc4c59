"""An export that is killed at any point leaves the old files, the new ones, or a folder that is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fcdp_compile.models.pretrained.exporting.export import Aside

INDEX = "model.safetensors.index.json"
Files = Mapping[str, str]
"""Texts by name, in place of tensors."""


def _single(values: str, config: str = "c") -> Files:
    return {"config.json": config, "model.safetensors": values}


def _sharded(values: str, count: int = 2, config: str = "c") -> Files:
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    weights = {f"w{i}": name for i, name in enumerate(names)}
    index = json.dumps({"metadata": {"of": values}, "weight_map": weights})
    return {"config.json": config, INDEX: index, **dict.fromkeys(names, values)}


def _adapter(values: str, config: str = "c") -> Files:
    return {"adapter_config.json": config, "adapter_model.safetensors": values}


def _read(folder: Path) -> str | None:
    """The texts that a reader takes: configuration, and single file or else index; None if refused."""
    for config, entry in (
        ("config.json", "model.safetensors"),
        ("adapter_config.json", "adapter_model.safetensors"),
    ):
        if (folder / entry).exists():
            return (folder / config).read_text() + (folder / entry).read_text()
    if not (folder / INDEX).exists():
        return None
    index = json.loads((folder / INDEX).read_text())
    values = {(folder / shard).read_text() for shard in index["weight_map"].values()}
    assert values == {index["metadata"]["of"]}, "shards of two exports"
    return (folder / "config.json").read_text() + values.pop()


class _Killed(BaseException):
    pass


@contextmanager
def _killed_after(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[list[str]]:
    """End the process before change number `count` to the file system; yields the changes made."""
    made: list[str] = []

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **options: Any) -> Any:
            if len(made) >= count:
                raise _Killed
            made.append(act.__name__)
            return act(*args, **options)

        return do

    with monkeypatch.context() as patch:
        for name in ("rename", "unlink", "link", "mkdir", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        yield made


def _write(folder: Path, files: Files) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


def _export(folder: Path, files: Files) -> None:
    aside = Aside(folder)
    aside.make()
    _write(aside.path, files)
    aside.publish()


CASES: dict[str, tuple[Files, Files]] = {
    "one file": (_single("old"), _single("new")),
    "as many shards": (_sharded("old"), _sharded("new")),
    "more shards": (_sharded("old"), _sharded("new", 3)),
    "shards to one file": (_sharded("old"), _single("new")),
    "one file to shards": (_single("old"), _sharded("new")),
    "an adapter": (_adapter("old"), _adapter("new")),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("config", ["c", "d"])
def test_killed_at_every_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, config: str
) -> None:
    old, new = CASES[case]
    new = {n: config if n.endswith("config.json") else text for n, text in new.items()}
    seen = set()
    for count in range(100):
        folder = tmp_path / str(count)
        folder.mkdir()
        _write(folder, old)
        (folder / "notes.txt").write_text("mine")
        try:
            with _killed_after(monkeypatch, count):
                _export(folder, new)
            finished = True
        except _Killed:
            finished = False
        seen.add(_read(folder))
        assert seen <= {"cold", config + "new", None}, f"after {count} changes"
        # The next export is complete and removes all that was left behind.
        _export(folder, new)
        assert {p.name: p.read_text() for p in folder.iterdir()} == {**new, "notes.txt": "mine"}
        if finished:
            break
    assert finished
    assert {"cold", config + "new"} <= seen


def test_a_new_folder_appears_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in range(100):
        folder = tmp_path / str(count) / "below" / "export"
        try:
            with _killed_after(monkeypatch, count):
                _export(folder, _sharded("new"))
        except _Killed:
            assert not folder.exists()
        else:
            break
    assert {p.name: p.read_text() for p in folder.iterdir()} == _sharded("new")
    assert os.listdir(folder.parent) == ["export"]


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"w": 3}}', None])
def test_a_broken_export_is_replaced(tmp_path: Path, index: str | None) -> None:
    _write(tmp_path, _sharded("old"))
    if index is None:
        (tmp_path / "model-00001-of-00002.safetensors").unlink()
    else:
        (tmp_path / INDEX).write_text(index)
    _export(tmp_path, _sharded("new", 3))
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == _sharded("new", 3)
