"""The package as pip would lay it out, but as links to the checkout: not every machine with torch has pip."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BESIDE = ("benchmarks", "tests", "pyproject.toml")
"""What the parts read besides the package."""


def link_tree(folder: Path) -> Path:
    """Fill a new folder and return it: as working folder, it has the package and its entry points."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, mapped = settings["project"], settings["tool"]["setuptools"]["package-dir"]
    for package, source in sorted(mapped.items()):
        target = folder.joinpath(*package.split("."))
        if "." in package:
            target.symlink_to(ROOT / source)
            continue
        target.mkdir(parents=True)
        for entry in (ROOT / source).iterdir():
            (target / entry.name).symlink_to(entry)
    for name in _BESIDE:
        (folder / name).symlink_to(ROOT / name)
    about = folder / f"{project['name']}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project["entry-points"].items()
    lines = [
        line
        for group, points in groups
        for line in (f"[{group}]", *(f"{name} = {where}" for name, where in points.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join([*lines, ""]))
    return folder
