"""Our code names the device of every tensor that it makes: else `torch.set_default_device` moves it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FACTORIES = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones"),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}


def _without_device(source: str) -> list[int]:
    """The lines that call a factory of tensors and name no device."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


def test_every_tensor_of_ours_says_its_device() -> None:
    rooms = [ROOT / name for name in ("fcdp_compile", "passes", "runtime")]
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for room in rooms
        for file in sorted(room.rglob("*.py"))
        for line in _without_device(file.read_text(encoding="utf-8"))
    ]
    assert found == []
    assert _without_device("import torch\ntorch.zeros(2, dtype=torch.int64)\n") == [2]
