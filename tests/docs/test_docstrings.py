"""Docstrings in house style, as the API reference shows them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.blocks import ROOT

pytest.importorskip("griffe", reason="griffe is not installed (pip install '.[docs]')")


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site_docstrings", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


as_markdown = _load(ROOT / "docs" / "site" / "docstrings.py").as_markdown


def test_arguments_are_a_list_and_what_is_raised_a_heading() -> None:
    shown = as_markdown(
        "Do it.\n\n    code: stays\n\nWhy, at length: prose.\n\n"
        "model: sharded,\ncompiled or not.  folder, name: where.\nRaises: ValueError if not."
    )
    assert shown == (
        "Do it.\n\n    code: stays\n\nWhy, at length: prose.\n\n"
        "\n* `model`: sharded,\n  compiled or not.\n* `folder`, `name`: where.\n"
        "\n**Raises:** ValueError if not."
    )


def test_prose_stays_as_it_is() -> None:
    text = "Add up.\n\nSee [Note: chunk order] for why."
    assert as_markdown(text) == "Add up.\n\nSee Note: chunk order for why."
