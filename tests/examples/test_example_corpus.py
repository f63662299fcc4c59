"""The example's text: real, bounded, the same on every rank, each window dealt once an epoch."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    """Import a module of the examples, which are scripts and no package."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


corpus = load_example("corpus")


def test_default_texts_are_real_different_and_repeatable() -> None:
    base = corpus.base_text(seed=0, limit_bytes=200_000)
    lora = corpus.lora_text(seed=0, limit_bytes=200_000)
    assert base.count("def ") > 100
    assert lora.count("#") > 100
    assert len(base.encode()) >= 200_000
    assert len(lora.encode()) >= 200_000
    assert base == corpus.base_text(seed=0, limit_bytes=200_000)
    assert base != corpus.base_text(seed=1, limit_bytes=200_000)


def test_lora_text_falls_back_to_what_torch_brings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paths = dict.fromkeys(("stdlib", "include", "purelib"), str(tmp_path / "missing"))
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: paths)
    assert "#include" in corpus.lora_text(seed=0, limit_bytes=100_000)
    with pytest.raises(corpus.CorpusError, match=r"no text files in .*missing.*--data"):
        corpus.base_text(seed=0, limit_bytes=100)


def test_folder_text_takes_text_and_leaves_the_rest(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a.txt").write_text("über alles")
    (tmp_path / "no_suffix").write_text("plain")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    (tmp_path / "zeros.bin").write_bytes(b"abc\0def")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("secret")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    text = corpus.folder_text(tmp_path, seed=0, limit_bytes=1000)
    assert sorted(text.split("\n")) == ["plain", "über alles"]


@pytest.mark.parametrize("limit_bytes", range(1, 9))
def test_limit_cuts_no_character_in_two(tmp_path: Path, limit_bytes: int) -> None:
    (tmp_path / "a.txt").write_text("xé€𝄞", encoding="utf-8")  # 1 + 2 + 3 + 4 bytes
    text = corpus.folder_text(tmp_path, seed=0, limit_bytes=limit_bytes)
    assert "xé€𝄞".startswith(text)
    assert len(text.encode()) <= limit_bytes


def test_folder_without_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "only.bin").write_bytes(b"\xff\xff")
    with pytest.raises(corpus.CorpusError, match=re.escape(f"no text files in {tmp_path};")):
        corpus.folder_text(tmp_path, seed=0, limit_bytes=1000)
    with pytest.raises(corpus.CorpusError, match="missing is not a folder"):
        corpus.folder_text(tmp_path / "missing", seed=0, limit_bytes=1000)


def test_too_short_a_text_says_how_short() -> None:
    with pytest.raises(corpus.CorpusError, match=r"5 tokens .* needs 8.*--seq-len"):
        corpus.Windows.cut("hello", corpus.encode_bytes, length=8)


def test_windows_hold_the_text_in_order_across_pieces() -> None:
    text = "".join(chr(97 + i % 26) for i in range(40_000)) + "é"
    windows = corpus.Windows.cut(text, corpus.encode_bytes, length=100)
    assert windows.tokens.shape == (400, 100)
    assert bytes(windows.tokens.flatten().tolist()) == text.encode()[:40_000]


def test_an_epoch_deals_each_window_once_over_ranks_and_steps() -> None:
    windows = corpus.Windows(tokens=torch.arange(24).view(24, 1))
    deal = {"size": 2, "world_size": 4, "seed": 3}
    dealt = [
        windows.batch(step, rank=rank, **deal).flatten().tolist()
        for step in range(6)
        for rank in range(4)
    ]
    first, second = ([w for batch in dealt[half : half + 12] for w in batch] for half in (0, 12))
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second
    assert first != list(range(24))


def test_batches_larger_than_the_text_go_round() -> None:
    windows = corpus.Windows(tokens=torch.arange(3).view(3, 1))
    batch = windows.batch(0, size=7, rank=1, world_size=2, seed=0)
    assert batch.shape == (7, 1)
    assert set(batch.flatten().tolist()) == {0, 1, 2}
