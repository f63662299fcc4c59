"""If a library of an extra is missing, one sentence says what to install, wherever it is needed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fcdp_compile import extras
from fcdp_compile.errors import FcdpError
from fcdp_compile.models.checkpointing.saving import need_bar
from fcdp_compile.tools.planner.ranking_table import check_plot
from fcdp_compile.tools.planner.source import ModelOptions, find_source

ROOT = Path(__file__).parents[2]

_IMPORTS = """
import importlib, sys
import fcdp_compile
sys.modules |= dict.fromkeys(("safetensors", "transformers", "lightning_fabric"))
for wanted in ("load_pretrained", "save_pretrained"):
    try:
        getattr(fcdp_compile, wanted)
    except fcdp_compile.FcdpError as error:
        print(error)
for wanted in ("transformers", "fabric"):
    try:
        importlib.import_module(f"fcdp_compile.integrations.{wanted}")
    except ImportError as error:
        print(error)
"""


def test_public_names_that_need_an_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True, cwd=ROOT
    )
    needs = "needs {0}, which cannot be imported (import of {0} halted; None in sys.modules); "
    files = "reading and writing checkpoints of Hugging Face " + needs.format("safetensors")
    trainer = "fcdp in the Trainer of Hugging Face " + needs.format("transformers")
    fabric = "fcdp in Lightning Fabric " + needs.format("lightning_fabric")
    assert done.stdout.splitlines() == [
        files + "pip install 'fcdp[checkpoint]'",
        files + "pip install 'fcdp[checkpoint]'",
        trainer + "pip install 'fcdp[hf]'",
        fabric + "pip install 'fcdp[fabric]'",
    ]


def test_arguments_that_need_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("tqdm", "transformers", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(FcdpError, match=r"progress=True needs tqdm.*'fcdp\[checkpoint\]'"):
        need_bar(shown=True)
    with pytest.raises(FcdpError, match=r"--plot needs matplotlib.*'fcdp\[bench\]'"):
        check_plot("sweep.svg")
    with pytest.raises(FcdpError, match=r"gpt-10b needs transformers.*'fcdp\[hf\]'"):
        find_source("gpt-10b", ModelOptions(seq=8))


def test_extras_bring_what_they_are_named_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for library, extra in extras._EXTRA_OF.items():
        wanted = project["optional-dependencies"][extra]
        names = [line.replace("-", "_") for line in wanted]
        assert any(name.startswith(library) for name in names), (library, extra)
