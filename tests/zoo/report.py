"""Write docs/zoo.md from the outcomes of training the zoo."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from tabulate import tabulate

from tests.distributed.parity import RELATIVE
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.cases import ZOO, ZooCase
from tests.zoo.compare import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
ROWS = PAGE.parent / "zoo" / "rows.json"

_HEAD = """# Models that were tried

These are tiny models of real architectures (2 layers, fp32, no dropout, random weights; no model hub is
needed). Each model was trained for a few steps with AdamW on 2 x 2 ranks, sharded with strategy `fcdp`
and compiled. A replicated copy was trained in the same process. Losses and gradients were compared after
every step, and all parameters at the end. Both sides compute in fp32 but add in another order; a relative
difference of up to {relative:.0e} counts as the same.

Written on {date} by `FCDP_ZOO=write make test PYTEST_ARGS="tests/zoo"` from [raw rows](zoo/rows.json)
with Python {python}, torch {torch}, transformers {transformers}, peft {peft}, on CPUs with Gloo and
`compute="eager"`. `FCDP_ZOO=1` runs the same tests and writes nothing.

* *difference*: the largest difference of all losses, gradients and parameters, relative to the largest
  element.
* *graphs*: the number of compiled graphs that use parameters. A change of the model during the training
  adds graphs.
* *breaks*: the kinds of graph breaks that `fcdp_compile.explain(model)` reports. The notes below name the
  lines.
* *outside*: the number of parameters that no compiled graph uses. They are gathered one by one
  (right, but slow), or not at all if nothing uses them.
"""


def record(outcomes: Mapping[str, Outcome]) -> None:
    """Add outcomes to the rows, in place of older rows of the same cases, and write the page anew."""
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    rows |= {name: _row(outcome) for name, outcome in outcomes.items()}
    ROWS.parent.mkdir(exist_ok=True)
    ROWS.write_text(json.dumps({n: rows[n] for n in ZOO if n in rows}, indent=1) + "\n")
    _write({n: Outcome(**rows[n]) for n in ZOO if n in rows})


def _row(outcome: Outcome) -> dict[str, Any]:
    places = [_shortened(place) for place in outcome.broken_at]
    return asdict(outcome) | {"broken_at": places, "error": outcome.error.partition("\n")[0]}


def _write(outcomes: Mapping[str, Outcome]) -> None:
    notes = _Notes()
    parts = [_head()]
    checkpointed = [n for n in ZOO if ZOO[n].is_checkpointed]
    plain = [n for n in ZOO if _is_plain(ZOO[n])]
    others = [n for n in ZOO if n not in (*plain, *checkpointed)]
    for title, names in (
        ("Architectures", plain),
        ("Activation checkpointing", checkpointed),
        ("PEFT on Llama", others),
    ):
        parts.append(
            f"## {title}\n\n{_table([n for n in names if n in outcomes], outcomes, notes)}\n"
        )
    if notes.texts:
        parts.append(f"## Where graphs break\n\n{notes}\n")
    PAGE.write_text("\n".join(parts))


def _is_plain(case: ZooCase) -> bool:
    return case.method in ("full", "LoRA")


def _head() -> str:
    return _HEAD.format(
        relative=RELATIVE,
        date=datetime.date.today().isoformat(),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        peft=peft.__version__,
    )


class _Notes:
    """Numbered texts; equal texts have one number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1

    def __str__(self) -> str:
        return "\n".join(f"{i}. {text}" for i, text in enumerate(self.texts, 1))


def _table(names: list[str], outcomes: Mapping[str, Outcome], notes: _Notes) -> str:
    rows = []
    for name in names:
        case, outcome = ZOO[name], outcomes[name]
        row = [ARCHITECTURES[case.architecture].title, case.method]
        if outcome.error:
            row += ["**refused**", "", "", ""]
        else:
            breaks = str(len(outcome.breaks) or "none")
            if outcome.breaks:
                breaks += f" (note {notes.number(_breaks(outcome))})"
            row += [
                f"{outcome.difference:.1e}",
                str(outcome.graphs),
                breaks,
                str(outcome.uncovered or "none"),
            ]
        rows.append([*row, case.remark])
    headers = ["model", "trained", "difference", "graphs", "breaks", "outside", "remarks"]
    return tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True)


def _breaks(outcome: Outcome) -> str:
    reasons = "; ".join(reason for reason, _ in outcome.breaks)
    places = ", ".join(f"`{place}`" for place in outcome.broken_at)
    return f"{reasons}. At {places or 'lines that torch no longer remembers'}"


def _shortened(place: str) -> str:
    """Remove the folder of installed packages, which differs between machines."""
    return place.rpartition("site-packages/")[2]
