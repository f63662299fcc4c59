"""Checkpoints are read in place of gathers only if they are on a disk of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from fcdp_compile.models.pretrained.source import is_local

LOCAL = ("ext4", "xfs", "tmpfs", "overlay")
REMOTE = ("nfs4", "lustre", "fuse", "fuse.s3fs")


@pytest.mark.parametrize(
    ("kind", "local"), [*((k, True) for k in LOCAL), *((k, False) for k in REMOTE)]
)
def test_the_innermost_file_system_decides(tmp_path: Path, kind: str, local: bool) -> None:
    data = tmp_path / "my データ"
    data.mkdir()
    (data / "file").touch()
    mounts = tmp_path / "mounts"
    inner = str(data).replace(" ", "\\040")
    other = "ext4" if not local else "nfs"
    mounts.write_text(
        f"a / {other} rw 0 0\nb {inner} {kind} rw 0 0\nc {data.parent}/x {other} rw 0 0\n"
    )
    assert is_local(data / "file", mounts) is local
    assert is_local(tmp_path / "mounts", mounts) is (other == "ext4")


def test_what_the_system_does_not_tell(tmp_path: Path) -> None:
    assert not is_local(tmp_path / "nowhere")
    assert not is_local(tmp_path, tmp_path / "no list")
