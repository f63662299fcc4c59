"""Everything that a plan says about one bucket, in a few lines."""

from __future__ import annotations

from fcdp_compile.files.json_records import one_line
from fcdp_compile.plan import Bucket, Placement, Plan, Schedule, Step
from fcdp_compile.strategy.formats import Format
from fcdp_compile.view.short_names import fold_params


def explain_bucket(plan: Plan, bucket: Bucket) -> str:
    """Explain a bucket: its parameters, sizes, reasons, and its steps in each schedule."""
    placement = plan.placement(bucket.id)
    sizes = f"{bucket.slot_bytes} bytes a rank, {bucket.node_bytes} a node shard, {bucket.full_bytes} in full"
    lines = [
        f"bucket {bucket.id} of graph {plan.graph}, strategy {one_line(str(bucket.strategy))}",
        *(f"  {one_line(line)}" for line in fold_params(bucket.params)),
        f"size: {sizes}; {one_line(bucket.why)}",
        f"tier: {placement.tier.value}; {one_line(placement.why)}",
        f"between nodes: {_formats(bucket)}; gathers: {bucket.algorithm.value}",
        f"gradients: {_gradients(bucket, placement)}",
    ]
    for schedule in plan.schedules:
        lines += _moves(schedule, bucket)
    return "\n".join(lines)


def _formats(bucket: Bucket) -> str:
    shown = {Format.FULL: "unchanged"}
    weights = shown.get(bucket.wire, bucket.wire.value)
    if bucket.frozen:
        return f"weights {weights}"
    return f"weights {weights}, gradients {shown.get(bucket.reduce_wire, bucket.reduce_wire.value)}"


def _gradients(bucket: Bucket, placement: Placement) -> str:
    if bucket.frozen:
        return "none, it is frozen"
    waits = {
        "none": "they are reduced to the home shards in every micro-batch",
        "host": "within no_sync they wait in host memory",
        "gpu": "within no_sync they wait on the gpu",
    }
    return f"in {bucket.reduce_dtype}; {waits[placement.gradient_tier.value]}"


def _moves(schedule: Schedule, bucket: Bucket) -> list[str]:
    steps = [s for s in schedule.steps if s.bucket == bucket.id]
    title = f"{schedule.direction.value} {schedule.variant.value}"
    if not steps:
        return [f"{title}: not used"]
    return [f"{title}:", *(f"  {_move(step, len(schedule.steps))}" for step in steps)]


def _move(step: Step, count: int) -> str:
    sent = f", {step.bytes} bytes" if step.bytes else ""
    label = f", {one_line(step.label)}" if step.label else ""
    return f"step {step.index} of {count}: {step.kind.value}{label}{sent}"
