"""House docstrings as Markdown, for the API reference.

    one argument a line, and what it raises         a list, and a heading of its own
    name: what it is; its default                   * `name`: what it is; its default
    Raises: ValueError if …                         **Raises:** ValueError if …

griffe knows the styles of Google, NumPy and Sphinx, but not ours.  `mkdocs.yml` names this file.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ITEM = re.compile(r"^((?:[a-z_][\w.]*)(?:, [a-z_][\w.]*)*): ")
_RAISES = re.compile(r"^(Raises|Source|Sources|Shapes and units|Requires|Leaves): ")
_SECOND_ITEM = re.compile(r"(?<=\.)  (?=[a-z_]\w*(?:, [a-z_]\w*)*: )")
_CROSS_REFERENCE = re.compile(r"\[Note: ([^\]]*)\]")


class HouseDocstrings(griffe.Extension):
    """Rewrites each docstring once, when griffe has read its object."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """Turn a docstring in house style into Markdown."""
    lines = _SECOND_ITEM.sub("\n", docstring).splitlines()
    out: list[str] = []
    inside_item = False
    for line in lines:
        line = _CROSS_REFERENCE.sub(r"Note: \1", line)
        if not line.strip() or line.startswith("    "):
            inside_item = False
            out.append(line)
        elif item := _ITEM.match(line):
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            out += [*([] if inside_item else [""]), f"* {names}: {line[item.end() :]}"]
            inside_item = True
        elif heading := _RAISES.match(line):
            out += ["", f"**{heading[1]}:** {line[heading.end() :]}"]
            inside_item = False
        else:
            out.append(f"  {line}" if inside_item else line)
    return "\n".join(out)
