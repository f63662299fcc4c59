"""`fcdp dump FOLDER`: print the plans that the backend wrote with the option `dump`.

The folder holds `graph-000.plan.json`, `graph-001.plan.json`, ..., `model-1-graph-000.plan.json` for
a second model, ... and printed graphs (`*.txt`), which are for reading as they are.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from fcdp_compile.cli.answer import Answer
from fcdp_compile.cli.fold import fold_numbers, fold_params
from fcdp_compile.plan import Bucket, Lane, Plan, Schedule, Step
from fcdp_compile.plan_json import one_line, read_plan, to_json

SUMMARY = "print the plans of compiled graphs: buckets and ordered steps"
DESCRIPTION = (
    "Print what was compiled: the buckets of each graph (parameters, bytes, dtype, tier and why) "
    "and the ordered steps of each schedule (lane, bucket, bytes, what they wait for)."
)

_BUCKET_HEADERS = (
    "bucket",
    "parameters",
    "count",
    "slot MiB",
    "node MiB",
    "full MiB",
    "dtype",
    "reduce dtype",
    "frozen",
    "tier",
    "why",
)
_LINKS = (Lane.INTER, Lane.INTRA, Lane.H2D, Lane.D2H)
_MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `fcdp dump`."""
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help='what torch.compile(..., options={"dump": FOLDER}) was given',
    )
    parser.add_argument(
        "--format",
        choices=("table", "json"),
        default="table",
        help="table: for reading (default); json: the plan itself, a list if there are several",
    )


def run(options: argparse.Namespace) -> Answer:
    """Format the plans of a folder.

    Raises: PlanFormatError for a damaged plan; OSError for a folder or file that cannot be read.
    """
    plans = {path: read_plan(path) for path in _find(Path(options.folder))}
    if options.format == "table":
        return Answer("\n\n\n".join(_format_plan(p, plan) for p, plan in plans.items()))
    texts = [to_json(plan).rstrip("\n") for plan in plans.values()]
    return Answer(texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]")


def _find(folder: Path) -> list[Path]:
    if not folder.exists():
        raise FileNotFoundError(
            f"{folder}: no such folder; pass the one given to the backend's option dump"
        )
    if not folder.is_dir():
        raise NotADirectoryError(
            f"{folder}: not a folder; pass the one given to the backend's option dump"
        )
    found = [p for p in folder.iterdir() if p.match("*graph-*.plan.json")]
    if not found:
        raise FileNotFoundError(
            f"{folder}: holds no graph-*.plan.json; compile with this folder as the option dump"
        )
    return sorted(found, key=lambda p: _with_numbers(p.name))


def _with_numbers(name: str) -> list[str | int]:
    """A sort key: graph-1000 stands after graph-999."""
    return [int(x) if i % 2 else x for i, x in enumerate(re.split(r"([0-9]+)", name))]


def _format_plan(path: Path, plan: Plan) -> str:
    header = (
        f"{one_line(path.name.removesuffix('.plan.json'))}: "
        f"graph {plan.graph}, strategy {one_line(plan.strategy)}, "
        f"{plan.nodes} x {plan.ranks_per_node} ranks (N x g), digest {plan.digest()[:12]}"
    )
    refresh = fold_numbers(sorted(plan.refresh)) or "none"
    sections = [header, _format_buckets(plan), f"refresh before a forward: {refresh}"]
    directions = [schedule.direction for schedule in plan.schedules]
    sections += [
        _format_schedule(schedule, has_variants=directions.count(schedule.direction) > 1)
        for schedule in plan.schedules
    ]
    return "\n\n".join(sections)


def _format_buckets(plan: Plan) -> str:
    rows = [_bucket_row(bucket) for bucket in plan.buckets]
    count = sum(len(bucket.params) for bucket in plan.buckets)
    rows.append(("total", "", str(count), *_sizes(*plan.buckets), "", "", "", "", ""))
    align = ("right", "left", "right", "right", "right", "right", *["left"] * 5)
    return _table(_BUCKET_HEADERS, rows, align)


def _bucket_row(bucket: Bucket) -> tuple[str, ...]:
    return (
        str(bucket.id),
        "\n".join(one_line(line) for line in fold_params(bucket.params)),
        str(len(bucket.params)),
        *_sizes(bucket),
        bucket.dtype,
        bucket.reduce_dtype,
        "yes" if bucket.frozen else "no",
        bucket.tier.value,
        one_line(bucket.why),
    )


def _sizes(*buckets: Bucket) -> tuple[str, ...]:
    """Slots, node shards and full parameters in MiB."""
    # Each by itself: what strategies cut over fewer ranks than the mesh has is whole sooner.
    return (
        _mib(sum(b.slot_bytes for b in buckets)),
        _mib(sum(b.node_bytes for b in buckets)),
        _mib(sum(b.full_bytes for b in buckets)),
    )


def _format_schedule(schedule: Schedule, *, has_variants: bool) -> str:
    title = schedule.direction.value + (f" {schedule.variant.value}" if has_variants else "")
    headers = ("step", "kind", "lane", "bucket", "bytes", "waits for", "label")
    rows = [_step_row(step) for step in schedule.steps]
    moved = sum(step.bytes for step in schedule.steps)
    rows.append(("total", f"{len(schedule.steps)} steps", "", "", str(moved), "", ""))
    align = ("right", "left", "left", "right", "right", "left", "left")
    return f"{title}\n\n{_table(headers, rows, align)}\n\n{_format_links(schedule)}"


def _step_row(step: Step) -> tuple[str, ...]:
    return (
        str(step.index),
        step.kind.value,
        step.lane.value,
        "" if step.bucket is None else str(step.bucket),
        str(step.bytes),
        fold_numbers(sorted(step.waits)),
        one_line(step.label),
    )


def _format_links(schedule: Schedule) -> str:
    rows = []
    for lane in _LINKS:
        steps = [step for step in schedule.steps if step.lane is lane]
        moved = sum(step.bytes for step in steps)
        rows.append((lane.value, str(len(steps)), str(moved), _mib(moved)))
    return _table(("link", "steps", "bytes", "MiB"), rows, ("left", "right", "right", "right"))


def _mib(size_bytes: int) -> str:
    """Three decimals, and never a zero for something."""
    return "<0.001" if 0 < size_bytes < _MIB / 2000 else f"{size_bytes / _MIB:.3f}"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: Sequence[str]) -> str:
    text = tabulate(
        rows,
        headers=headers,
        colalign=align,
        tablefmt="simple",
        disable_numparse=True,
    )
    return "\n".join(line.rstrip() for line in text.splitlines())
