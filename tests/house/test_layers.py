"""The rules of `tests.imports` hold for the source, and notice what breaks them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.imports import (
    DATA,
    FORBIDDEN,
    GROUPS,
    LATE,
    MOST_FILES,
    PRIVATE_ALLOWED_IN,
    ROOMS,
    ROOT,
    all_imports,
    has_private_torch_name,
    hidden_imports,
    imports_of,
    is_late,
    is_within,
    private_names,
    reached,
    room_of,
    sources,
    upward,
    wrong_arrows,
)


def test_arrows_point_one_way() -> None:
    assert wrong_arrows(all_imports()) == []


def test_rooms_know_only_those_below() -> None:
    assert upward(all_imports()) == []
    groups = {f"fcdp_compile.{name}" for name in GROUPS}
    rooms = [m for m in sources() if m.startswith("fcdp_compile.") and m not in groups]
    assert [m for m in rooms if room_of(m) < 0] == []
    inside = [i for i in all_imports() if is_within(i.importer, "fcdp_compile")]
    used = {room_of(i.importer) for i in inside} | {room_of(i.target) for i in inside}
    assert set(range(len(ROOMS))) <= used


def test_no_room_is_crowded() -> None:
    folders: dict[Path, int] = {}
    for path in sources().values():
        folders[path.parent] = folders.get(path.parent, 0) + 1
    crowded = {str(f.relative_to(ROOT)): n for f, n in folders.items() if n > MOST_FILES}
    assert crowded == {}
    at_root = [p for p in (ROOT / "fcdp_compile").glob("*.py") if p.stem != "__init__"]
    assert len(at_root) <= 6


def test_one_folder_names_kinds_of_cards() -> None:
    found = [
        str(i)
        for i in all_imports()
        if is_within(i.target, "torch.cuda")
        and is_within(i.importer, "fcdp_compile")
        and not is_within(i.importer, "fcdp_compile.devices")
        and not is_within(i.importer, PRIVATE_ALLOWED_IN)
    ]
    assert found == []


def test_private_torch_names_live_in_one_folder() -> None:
    assert private_names(all_imports()) == []


def test_no_import_hides_in_a_function() -> None:
    assert hidden_imports(all_imports()) == []


@pytest.mark.parametrize("name", DATA)
def test_data_does_not_reach_forbidden_modules_through_others(name: str) -> None:
    imports, modules = all_imports(), set(sources())
    inside = [m for m in modules if is_within(m, f"fcdp_compile.{name}")]
    assert inside
    for start in inside:
        for module, asked_by in reached(start, imports, modules).items():
            bad = [
                str(found)
                for found in imports
                if found.importer == module
                and any(is_within(found.target, x) for x in FORBIDDEN[f"fcdp_compile.{name}"])
            ]
            assert bad == [], f"{start} reaches {module} through {asked_by}"


@pytest.mark.parametrize("name", DATA)
def test_data_and_the_command_need_no_torch(name: str) -> None:
    """So that reading a plan, and the command, need not wait for torch."""
    imports, modules = all_imports(), set(sources())
    starts = [m for m in modules if is_within(m, f"fcdp_compile.{name}")]
    all_reached = {m for start in starts for m in [start, *reached(start, imports, modules)]}
    assert [
        str(found)
        for found in imports
        if found.importer in all_reached and is_within(found.target, "torch")
    ] == []


def test_what_is_imported_late_is_so_and_needs_it() -> None:
    """Control: no exception is stale, or for a module that could be imported at the top."""
    imports, modules = all_imports(), set(sources())
    assert {(i.importer, i.target) for i in imports if is_late(i)} == set(LATE)
    for _, target in LATE:
        needed = {target, *reached(target, imports, modules)}
        assert any(i.importer in needed and is_within(i.target, "torch") for i in imports)


def test_the_project_is_really_read() -> None:
    """Control: the parser saw every layer, and arrows that are known to exist."""
    seen = {(found.importer, found.target) for found in all_imports()}
    assert ("fcdp_compile.plan.records", "fcdp_compile.core.params.layout.ParamLayout") in seen
    assert ("fcdp_compile.cli", "fcdp_compile.cli.dump") in seen
    for package in ("passes", "runtime"):
        assert any(is_within(importer, f"fcdp_compile.{package}") for importer, _ in seen)
    assert any(
        importer == PRIVATE_ALLOWED_IN and has_private_torch_name(target)
        for importer, target in seen
    )


# Controls: each way to break a rule is caught.


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fcdp_compile.passes.lower", "import torch.distributed"),
        ("fcdp_compile.passes.lower", "import torch.distributed as dist"),
        ("fcdp_compile.passes.lower", "from torch import distributed as dist"),
        ("fcdp_compile.passes.lower", "from torch.distributed import all_reduce"),
        ("fcdp_compile.passes.lower", "import torch\ndef f(): torch.distributed.barrier()"),
        ("fcdp_compile.passes.lower", "import torch\nx: torch.distributed.Work"),
        ("fcdp_compile.passes.lower", "import torch as t\nt.distributed.barrier()"),
        ("fcdp_compile.passes.lower", "from fcdp_compile.runtime.executor import run"),
        ("fcdp_compile.passes.lower", "from fcdp_compile import runtime"),
        ("fcdp_compile.passes.lower", "from ..runtime import executor"),
        ("fcdp_compile.passes.lower", "from .. import runtime"),
        ("fcdp_compile.passes.lower", "import fcdp_compile.backend"),
        ("fcdp_compile.passes.lower", "def f():\n    from fcdp_compile.backend import fcdp"),
        ("fcdp_compile.passes", "from torch.distributed import barrier"),
        ("fcdp_compile.runtime.executor", "from fcdp_compile.passes.lower import lower"),
        ("fcdp_compile.runtime.executor", "if TYPE_CHECKING:\n    import fcdp_compile.backend"),
        (
            "fcdp_compile.runtime.x",
            "import importlib\nimportlib.import_module('fcdp_compile.passes')",
        ),
        ("fcdp_compile.plan", "import torch.cuda"),
        ("fcdp_compile.plan.json", "import torch\ntorch.cuda.synchronize()"),
        ("fcdp_compile.core.params.layout", "from torch.distributed.tensor import Shard"),
        ("fcdp_compile.strategy", "from fcdp_compile.passes import lower"),
        ("fcdp_compile.cli.dump", "from fcdp_compile.runtime.collectives.counters import traffic"),
        ("fcdp_compile.cli", "from .. import backend"),
    ],
)
def test_a_wrong_arrow_is_found(module: str, source: str) -> None:
    is_package = module in ("fcdp_compile.passes", "fcdp_compile.cli")
    assert len(wrong_arrows(imports_of(module, source, is_package=is_package))) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fcdp_compile.passes.lower", "import torch.fx\nfrom fcdp_compile.plan import Plan"),
        ("fcdp_compile.passes.lower", "from fcdp_compile.passes.graph.context import PassContext"),
        ("fcdp_compile.passes.lower", "from . import context\nfrom .context import PassContext"),
        ("fcdp_compile.runtime.executor", "import torch.distributed\nfrom fcdp_compile import ops"),
        ("fcdp_compile.backend", "from fcdp_compile import passes, runtime"),
        ("fcdp_compile.passes.lower", "def f(torch): torch.distributed.barrier()"),
        ("fcdp_compile.plan", "import torch.distributed_is_another_name"),
        ("fcdp_compile.tools.planner", "import torch.distributed"),
    ],
)
def test_a_right_arrow_is_left_alone(module: str, source: str) -> None:
    assert wrong_arrows(imports_of(module, source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch import _guards",
        "from torch._dynamo import reset",
        "from torch.utils._pytree import tree_map",
        "from torch.fx.graph import _PyTreeInfo",
        "import torch\ntorch._C._log_api_usage_once('x')",
        "import torch\ndef f(x):\n    return torch.fx._symbolic_trace.Tracer()(x)",
        "import torch as t\nt._dynamo.reset()",
        "from torch import fx as torch_fx\ntorch_fx._compatibility",
        "from functorch._C import x",
        "from functorch.compile import _private",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert len(private_names(imports_of("fcdp_compile.backend", source))) == 1
    assert private_names(imports_of(PRIVATE_ALLOWED_IN, source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__\ntorch.library.custom_op",
        "import torch\ntorch.ops.aten._unsafe_view.default",
        "from torch import library\nfrom torch.library import register_fake",
        "from functorch.compile import min_cut_rematerialization_partition",
        "from fcdp_compile.torch_compat import fake_mode\nimport _thread",
    ],
)
def test_a_public_name_is_left_alone(source: str) -> None:
    assert private_names(imports_of("fcdp_compile.backend", source)) == []


def test_an_import_inside_a_function_is_found() -> None:
    source = "def f():\n    from fcdp_compile import plan\n    import json\n"
    found = imports_of("fcdp_compile.core.params.layout", source + "import fcdp_compile.errors\n")
    assert hidden_imports(found) == ["fcdp_compile.core.params.layout:2 imports fcdp_compile.plan"]
    assert hidden_imports(imports_of("fcdp_compile", source, is_package=True)) == []


def test_late_is_what_stands_in_a_function_of_that_module_alone() -> None:
    (importer, target), *_ = LATE
    late = f"import importlib\ndef f():\n    importlib.import_module({target!r})\n"
    assert hidden_imports(imports_of(importer, late)) == []
    assert len(hidden_imports(imports_of("fcdp_compile.cli.dump", late))) == 1
    modules = {importer, target}
    assert reached(importer, imports_of(importer, late), modules) == {}
    assert reached(importer, imports_of(importer, f"import {target}"), modules) == {
        target: importer
    }


def test_an_arrow_through_another_module_is_found() -> None:
    imports = [
        *imports_of("fcdp_compile.plan", "from fcdp_compile.core.sharding.shard import shard"),
        *imports_of(
            "fcdp_compile.core.sharding.shard", "from fcdp_compile.core.params import mesh"
        ),
    ]
    modules = {
        f"fcdp_compile.{name}" for name in ("plan", "core.sharding.shard", "core.params.mesh")
    }
    assert reached("fcdp_compile.plan", imports, modules) == {
        "fcdp_compile.core.sharding.shard": "fcdp_compile.plan",
        "fcdp_compile.core.params.mesh": "fcdp_compile.core.sharding.shard",
    }


def test_no_public_name_is_a_module_of_the_package_too() -> None:
    """An import of that module would put the module in the function's place."""
    import fcdp_compile

    package = ROOT / "fcdp_compile"
    paths = [p.relative_to(package).with_suffix("") for p in package.rglob("*.py")]
    modules = {".".join(path.parts) for path in paths}
    assert {path.parts[0] for path in paths}.isdisjoint(fcdp_compile.__all__)
    assert set(fcdp_compile._HOMES) == set(fcdp_compile.__all__)
    assert set(fcdp_compile._HOMES.values()) <= modules


def test_every_refusal_can_be_caught_as_one() -> None:
    """A caller that catches FcdpError catches them all: no plain ValueError or TypeError is raised."""
    plain = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("fcdp_compile", "passes", "runtime")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and getattr(node.exc.func, "id", "") in ("ValueError", "TypeError", "RuntimeError")
    ]
    assert not plain, f"raise ArgumentError, or another class of errors.py: {plain}"
