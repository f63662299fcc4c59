"""`fcdp dump FOLDER`: print the plans that the backend wrote with the option `dump`.

The folder holds `graph-000.plan.json`, `graph-001.plan.json`, ..., `model-1-graph-000.plan.json` for
a second model, ... recordings of them (`graph-000.recorded.json`, ...), the changes that each pass made to
their graphs (`graph-000.stages.json`, ...), and printed graphs (`*.txt`), which this command does not read.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fcdp_compile.cli import stages
from fcdp_compile.cli.command import Answer, Declared
from fcdp_compile.cli.tables.plan import (
    PLAN_SUFFIX,
    Measured,
    explain_bucket,
    format_plan,
    read_measured,
)
from fcdp_compile.cluster.profile import find_profile
from fcdp_compile.errors import FcdpError, ProfileError
from fcdp_compile.models.files.json_records import one_line
from fcdp_compile.plan import Direction, Plan, Variant
from fcdp_compile.plan.cost import MACHINES, Machine
from fcdp_compile.plan.diff import diff
from fcdp_compile.plan.json import read_plan, to_json
from fcdp_compile.tools.view.chrome_trace import Event, chrome_trace
from fcdp_compile.tools.view.short_names import fold_numbers
from fcdp_compile.tools.view.timeline_html import timeline_html

SUMMARY = "print the plans of compiled graphs: buckets and ordered steps"
DESCRIPTION = (
    "Print what was compiled: the buckets of each graph (parameters, bytes, dtype, tier and why) "
    "and the ordered steps of each schedule (lane, bucket, bytes, what they wait for)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `fcdp dump`."""
    folder = 'the folder given to torch.compile(..., options={"dump": FOLDER})'
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help=folder)
    add = Declared(parser)
    add.form(
        json="the plan itself, a list if there are several",
        chrome="a trace for Perfetto (ui.perfetto.dev) with a track for each lane, predicted times, and "
        "measured times if there is a recording",
        html="one page for a browser that explains the schedule and fetches nothing",
    )
    add.choice("--graph", [d.value for d in Direction], "only schedules of this direction")
    add.choice("--variant", [v.value for v in Variant], "only schedules of this variant")
    parser.add_argument(
        "--machine",
        metavar="NAME",
        default="cuda",
        help="the speeds for predicted times: cuda, an A100-class card on 10 Gbit/s (default); cpu, two "
        "cores; a built-in cluster; or a file that fcdp probe wrote",
    )
    add.value("--why", int, "BUCKET", "everything about one bucket")
    other = "the differences from another folder; exit code 1 if there are any"
    add.value("--diff", str, "OTHER", other)
    add.flag("--passes", "the passes in their order, explained; needs no folder")
    add.flag("--stages", "what each pass changed, and how long it took")
    add.value("--stage", str, "PASS", "each graph as text after a pass")
    both = "the differences of each graph between two passes; exit code 1 if there are any"
    add.value("--stage-diff", str, "PASS", both, nargs=2)


def run(options: argparse.Namespace) -> Answer:
    """Format the plans of a folder.

    Raises: PlanFormatError or RecordingError for a damaged plan or recording, FcdpError for a bucket,
    schedule or machine that does not exist; OSError for a folder or file that cannot be read.
    """
    if options.passes:
        return Answer(stages.passes_text())
    if options.folder is None:
        raise FcdpError("dump needs FOLDER, the one given to the option dump (--passes needs none)")
    if options.stages or options.stage or options.stage_diff:
        return _stages(options)
    whole = _read(options.folder)
    plans = _choose(whole, options.folder, options)
    if options.diff is not None:
        others = _choose(_read(options.diff), options.diff, options)
        return _compare(plans, others, (options.folder, options.diff))
    if options.why is not None:
        return Answer(_why(plans, options.why))
    if options.format == "json":
        texts = [to_json(plan).rstrip("\n") for plan in plans.values()]
        return Answer(texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]")
    machine, measured = _machine_named(options.machine), read_measured(options.folder, whole)
    if options.format == "chrome":
        return Answer(_trace(plans, machine, measured))
    if options.format == "html":
        by_position = {i: measured[path] for i, path in enumerate(plans) if path in measured}
        page = timeline_html(list(plans.values()), machine, measured=by_position)
        return Answer(page.rstrip("\n"))
    note = f"predicted with the speeds of {one_line(options.machine)}"
    tables = [
        format_plan(
            path.name.removesuffix(PLAN_SUFFIX),
            plan,
            machine=machine,
            note=note,
            measured=measured.get(path, {}),
        )
        for path, plan in plans.items()
    ]
    return Answer("\n\n\n".join(tables))


def _stages(options: argparse.Namespace) -> Answer:
    names = [path.name.removesuffix(PLAN_SUFFIX) for path in _find(Path(options.folder))]
    of = [word for word in (options.graph, options.variant) if word]
    found = stages.read(options.folder, names, of=of)
    if options.stage_diff:
        return stages.compared(found, tuple(options.stage_diff))
    return Answer(stages.shown(found, options.stage) if options.stage else stages.listed(found))


def _read(folder: str) -> dict[Path, Plan]:
    return {path: read_plan(path) for path in _find(Path(folder))}


def _choose(
    plans: Mapping[Path, Plan], folder: str, options: argparse.Namespace
) -> dict[Path, Plan]:
    """Return the plans, each with only the requested schedules."""
    chosen = {
        path: replace(
            plan,
            schedules=tuple(
                s
                for s in plan.schedules
                if options.graph in (None, s.direction.value)
                and options.variant in (None, s.variant.value)
            ),
        )
        for path, plan in plans.items()
    }
    if (options.graph or options.variant) and not any(p.schedules for p in chosen.values()):
        there = sorted(
            {f"{s.direction.value} {s.variant.value}" for p in plans.values() for s in p.schedules}
        )
        wanted = " ".join(o for o in (options.graph, options.variant) if o)
        raise FcdpError(
            f"{folder}: holds no schedule {wanted!r}; there is {', '.join(there) or 'none'}"
        )
    return chosen


def _why(plans: dict[Path, Plan], bucket_id: int) -> str:
    found = [
        explain_bucket(plan, bucket)
        for plan in plans.values()
        for bucket in plan.buckets
        if bucket.id == bucket_id
    ]
    if not found:
        known = sorted({b.id for plan in plans.values() for b in plan.buckets})
        raise FcdpError(
            f"there is no bucket {bucket_id}; the buckets are {fold_numbers(known) or 'none'}"
        )
    return "\n\n".join(found)


def _trace(plans: Mapping[Path, Plan], machine: Machine, measured: Mapping[Path, Measured]) -> str:
    events: list[Event] = []
    for path, plan in plans.items():
        first = len({e["pid"] for e in events})
        events += chrome_trace(plan, machine, first_process=first, measured=measured.get(path))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _compare(plans: dict[Path, Plan], others: dict[Path, Plan], folders: tuple[str, str]) -> Answer:
    mine, theirs = ({path.name: plan for path, plan in p.items()} for p in (plans, others))
    lines = []
    for a, b, folder in ((mine, theirs, folders[0]), (theirs, mine, folders[1])):
        lines += [f"only {folder} has {one_line(name)}" for name in a if name not in b]
    for name in (n for n in mine if n in theirs):
        found = [
            *diff(mine[name], theirs[name], names=folders),
            *_tiers(mine[name], theirs[name], folders),
        ]
        lines += [f"{one_line(name)}: {one_line(line)}" for line in found]
    return Answer("\n".join(lines), 1) if lines else Answer("no difference")


def _tiers(a: Plan, b: Plan, names: tuple[str, str]) -> list[str]:
    """Compare the tiers, GPU or host, which `diff` ignores because ranks need not agree on them."""
    theirs = {p.bucket: p for p in b.placements}
    pairs = [(x, theirs[x.bucket]) for x in a.placements if x.bucket in theirs]
    return [
        f"bucket {x.bucket} tier: {names[0]} {x.tier.value} ({x.why}); "
        f"{names[1]} {y.tier.value} ({y.why})"
        for x, y in pairs
        if x.tier is not y.tier and x.is_cached and y.is_cached
    ]


def _find(folder: Path) -> list[Path]:
    if not folder.exists():
        raise FileNotFoundError(
            f"{folder}: does not exist; pass the folder given to the backend's option dump"
        )
    if not folder.is_dir():
        raise NotADirectoryError(
            f"{folder}: is not a folder; pass the folder given to the backend's option dump"
        )
    found = [p for p in folder.iterdir() if p.match("*graph-*.plan.json")]
    if not found:
        raise FileNotFoundError(
            f"{folder}: holds no graph-*.plan.json; compile with this folder as the option dump"
        )
    return sorted(found, key=lambda p: _with_numbers(p.name))


def _with_numbers(name: str) -> list[str | int]:
    """Return a sort key: graph-1000 comes after graph-999."""
    return [int(x) if i % 2 else x for i, x in enumerate(re.split(r"([0-9]+)", name))]


def _machine_named(name: str) -> Machine:
    """Return the speeds of a type of device, of a built-in cluster, or of a profile's file.

    Raises: ProfileError for a damaged file, FcdpError for an unknown name; OSError for a file that
    cannot be read.
    """
    if name in MACHINES:
        return MACHINES[name]
    try:
        return find_profile(name).rank_machine
    except ProfileError:
        raise
    except FcdpError as error:
        raise FcdpError(f"{error}; {', '.join(MACHINES)} are machines too") from None
