"""Every import of the source, and the rules for imports between modules.

Looks at import statements, at `importlib.import_module("...")` and at dotted uses such as
`torch._dynamo.reset()` after `import torch`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent

GROUPS = ("core", "models", "tools")
"""Folders of rooms in `fcdp_compile`; they have no code of their own."""

ROOMS = (
    *("errors", "extras", "torch_compat"),
    *(
        "strategy",
        "devices",
        "core.ranks",
        "core.params",
        "models.quantised",
        "models.files",
        "plan",
        "cluster",
        "tools.simulator",
        "tools.view",
    ),
    *("ops", "buckets"),
    *("passes.graph", "passes", "passes.memory", "passes.planning"),
    *("runtime.lanes", "runtime.collectives", "runtime.cache", "runtime.parameters"),
    *("runtime.buckets", "runtime.optimizers", "runtime"),
    *(
        "tools.probe",
        "core.sharding",
        "models.parallel",
        "optimizers",
        "backend",
        "models.deferred",
        "tools.report",
        "models.pretrained",
        "models.checkpointing",
        "models.survival",
    ),
    *("tools.planner", "integrations", "cli.tables", "cli"),
)
"""Folders of `fcdp_compile` and modules at its root, lowest first: a room imports only from earlier rooms."""

DATA = (
    "plan",
    "core.params.layout",
    "strategy",
    "errors",
    "models.files.json_records",
    "cli",
    "tools.simulator",
    "tools.view",
)
"""Modules that work on a laptop: without GPU or process group, passes or runtime."""

FORBIDDEN: dict[str, tuple[str, ...]] = {
    "fcdp_compile.passes": ("torch.distributed", "fcdp_compile.runtime", "fcdp_compile.backend"),
    "fcdp_compile.runtime": ("fcdp_compile.passes", "fcdp_compile.backend"),
} | {
    f"fcdp_compile.{name}": (
        "torch.cuda",
        "torch.distributed",
        "fcdp_compile.passes",
        "fcdp_compile.runtime",
        "fcdp_compile.backend",
    )
    for name in DATA
}
"""Forbidden imports, by the module or package that must not have them."""

LATE = {
    ("fcdp_compile.cli.probe", "fcdp_compile.tools.probe.measure"): (
        "measuring needs torch and process groups, which no other command may wait for"
    ),
    ("fcdp_compile.cli.plan", "fcdp_compile.tools.planner.command"): "tracing needs torch",
    ("fcdp_compile.cli.simulate", "fcdp_compile.tools.planner.command"): "tracing needs torch",
    (
        "fcdp_compile.core.sharding.sharded_class",
        "fcdp_compile.models.pretrained.exporting.export",
    ): (
        "what saves reads models that shard has made, and needs packages that training does without"
    ),
}
"""Imports of our own modules that may be inside a function, with the reason."""

MOST_FILES = 25
"""Most files in a source folder."""

PRIVATE_ALLOWED_IN = "fcdp_compile.torch_compat"
PRIVATE_OF = ("torch", "functorch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One use of another module: importer, target, line, and whether inside a function."""

    importer: str
    target: str
    line: int
    is_inside_function: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def imports_of(module: str, source: str, *, is_package: bool = False) -> list[Import]:
    """Every import of a module; `from a import b` counts as an import of a.b."""
    tree = ast.parse(source)
    package = module if is_package else module.rpartition(".")[0]
    names = _bound_names(tree)
    found: list[Import] = []

    def visit(node: ast.AST, inside: bool) -> None:
        for target in _targets(node, package, names):
            line: int = getattr(node, "lineno", 0)
            found.append(
                Import(importer=module, target=target, line=line, is_inside_function=inside)
            )
        if isinstance(node, ast.Attribute) and _dotted(node):
            return
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside or function)

    visit(tree, False)
    return found


def _bound_names(tree: ast.AST) -> dict[str, str]:
    """The modules of the names that absolute imports bind: {"dist": "torch.distributed"}."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _targets(node: ast.AST, package: str, bound: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, base] if base else parents)
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and _dotted(node.func) in (
        "importlib.import_module",
        "import_module",
        "__import__",
    ):
        names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
        yield from (name for name in names if isinstance(name, str))
    elif isinstance(node, ast.Attribute) and (dotted := _dotted(node)):
        root, _, rest = dotted.partition(".")
        if root in bound and is_within(bound[root], "torch"):
            yield f"{bound[root]}.{rest}"


def _dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of names, else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def sources() -> dict[str, Path]:
    """Every file of the project by the name of its module."""
    files: dict[str, Path] = {}
    for folder, package in (
        ("fcdp_compile", "fcdp_compile"),
        ("passes", "fcdp_compile.passes"),
        ("runtime", "fcdp_compile.runtime"),
        ("examples", "examples"),
        ("benchmarks", "benchmarks"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            files[".".join([package, *(p for p in parts if p != "__init__")])] = path
    return files


@cache
def all_imports() -> list[Import]:
    """Every import of the project."""
    return [
        found
        for module, path in sources().items()
        for found in imports_of(module, path.read_text(), is_package=path.stem == "__init__")
    ]


def is_within(name: str, package: str) -> bool:
    """Whether a dotted name is a package or something inside it."""
    return name == package or name.startswith(f"{package}.")


def has_private_torch_name(target: str) -> bool:
    """Whether a dotted name goes through an underscore below torch or functorch.

    Operators are never private names, not even torch.ops.aten._unsafe_view.
    """
    root, *parts = target.split(".")
    if is_within(target, "torch.ops"):
        return False
    dunders = [p for p in parts if p.startswith("__") and p.endswith("__")]
    return root in PRIVATE_OF and any(p.startswith("_") and p not in dunders for p in parts)


def room_of(module: str) -> int:
    """The place in ROOMS of a module; -1 for a module that is in no room."""
    places = [n for n, room in enumerate(ROOMS) if is_within(module, f"fcdp_compile.{room}")]
    return max(places, key=lambda n: len(ROOMS[n]), default=-1)


def upward(imports: list[Import]) -> list[str]:
    """Imports of a room from a later room."""
    return [
        str(found)
        for found in imports
        if not is_late(found)
        and is_within(found.importer, "fcdp_compile")
        and found.importer != "fcdp_compile"
        and room_of(found.importer) < room_of(found.target)
    ]


def wrong_arrows(imports: list[Import]) -> list[str]:
    """Imports that a layer forbids."""
    return [
        str(found)
        for found in imports
        for package, forbidden in FORBIDDEN.items()
        if is_within(found.importer, package)
        and any(is_within(found.target, other) for other in forbidden)
    ]


def private_names(imports: list[Import]) -> list[str]:
    """Imports of private torch names outside the one folder for them."""
    return [
        str(found)
        for found in imports
        if has_private_torch_name(found.target)
        and not is_within(found.importer, PRIVATE_ALLOWED_IN)
    ]


def hidden_imports(imports: list[Import]) -> list[str]:
    """Imports of our own modules inside functions, except the lazy names of the package itself."""
    return [
        str(found)
        for found in imports
        if found.is_inside_function
        and is_within(found.target, "fcdp_compile")
        and found.importer != "fcdp_compile"
        and not is_late(found)
    ]


def is_late(found: Import) -> bool:
    """Whether an import is listed in LATE."""
    return found.is_inside_function and (found.importer, found.target) in LATE


def reached(start: str, imports: list[Import], modules: set[str]) -> dict[str, str]:
    """Our modules and packages that an import of `start` loads, each with the module that imports it."""
    edges: dict[str, list[str]] = {}
    for found in (i for i in imports if not is_late(i)):
        parts = found.target.split(".")
        for target in (".".join(parts[:n]) for n in range(len(parts), 0, -1)):
            if target in modules and target != "fcdp_compile":
                edges.setdefault(found.importer, []).append(target)
    via: dict[str, str] = {}
    waiting = [start]
    while waiting:
        module = waiting.pop()
        for target in edges.get(module, []):
            if target not in via and target != start:
                via[target] = module
                waiting.append(target)
    return via
