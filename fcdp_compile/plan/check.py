"""Check the rules for a plan that types do not express: references, ranges, slots that line up, lanes.

Used on every plan that is read from a file.  A fault names the field by its path in the file, such
as `buckets[2].params[0].layout.dim`.
"""

from __future__ import annotations

from fcdp_compile.files.json_records import MAX_INT, describe, fail
from fcdp_compile.params.layout import ParamLayout
from fcdp_compile.plan import LANES, Bucket, Kind, Lane, Plan, Schedule, Step
from fcdp_compile.strategy import Scope

ITEMSIZES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of the dtypes that a bucket can have, by torch's names without the `torch.`."""

MAX_RANKS = 2**20
MAX_SHAPE = 64  # torch's own limit on dimensions


def check_plan(plan: Plan) -> None:
    """Check all rules that types do not express; the first broken rule raises.

    Raises: json_records.Fault.
    """
    if not plan.strategy:
        fail("strategy", "is empty")
    _check_positive(plan.nodes, "nodes")
    _check_positive(plan.ranks_per_node, "ranks_per_node")
    if plan.nodes * plan.ranks_per_node > MAX_RANKS:
        fail("nodes", f"times ranks_per_node is more than {MAX_RANKS} ranks")
    ids: set[int] = set()
    for i, bucket in enumerate(plan.buckets):
        if bucket.id in ids:
            fail(f"buckets[{i}].id", f"is {bucket.id}, which an earlier bucket already has")
        ids.add(bucket.id)
        _check_bucket(bucket, plan, f"buckets[{i}]")
    _check_placements(plan)
    _check_refresh(plan.refresh, ids)
    seen: set[object] = set()
    for i, schedule in enumerate(plan.schedules):
        variant = (schedule.direction, schedule.variant)
        if variant in seen:
            name = f"{schedule.direction.value} {schedule.variant.value}"
            fail(f"schedules[{i}]", f"is a second {name} schedule")
        seen.add(variant)
        _check_schedule(schedule, ids, f"schedules[{i}]")


def check_layout(
    *,
    shape: tuple[int, ...],
    dim: int | None,
    nodes: int,
    ranks_per_node: int,
    home_node: int | None,
    path: str,
) -> None:
    """Check the fields of a ParamLayout before it is made.

    Raises: json_records.Fault, with the field below `path`.
    """
    if len(shape) > MAX_SHAPE:
        fail(f"{path}.shape", f"has {len(shape)} dimensions, more than {MAX_SHAPE}")
    if dim is None and shape:
        fail(f"{path}.dim", f"is null, which only a scalar may have, not shape {list(shape)}")
    if dim is not None and dim >= len(shape):
        fail(f"{path}.dim", f"is {dim}, but shape {list(shape)} has {len(shape)} dimensions")
    _check_positive(nodes, f"{path}.nodes")
    _check_positive(ranks_per_node, f"{path}.ranks_per_node")
    if home_node is not None and home_node >= nodes:
        fail(f"{path}.home_node", f"is {home_node}, but there are {nodes} nodes")


def _check_bucket(bucket: Bucket, plan: Plan, path: str) -> None:
    _check_dtype(bucket.dtype, bucket.itemsize, path, "")
    _check_dtype(bucket.reduce_dtype, bucket.reduce_itemsize, path, "reduce_")
    if not bucket.params:
        fail(f"{path}.params", "is empty")
    widest = max(bucket.itemsize, bucket.reduce_itemsize)
    names: set[str] = set()
    offset, last_home = 0, 0
    has_homes = bucket.params[0].layout.home_node is not None
    for i, param in enumerate(bucket.params):
        at = f"{path}.params[{i}]"
        if not param.name or param.name in names:
            fail(f"{at}.name", "appears twice in its bucket" if param.name else "is empty")
        names.add(param.name)
        _check_ranks(param.layout, bucket.strategy.home, plan, f"{at}.layout")
        home = param.layout.home_node
        if (home is not None) != has_homes or (home or 0) < last_home:
            fail(
                f"{at}.layout.home_node",
                "is not in the order of nodes, or only some parameters have one",
            )
        last_home = home or 0
        if param.offset != offset:
            fail(f"{at}.offset", f"is {param.offset}, but the slots before it end at {offset}")
        offset += param.layout.slot_elements
        if offset * plan.nodes * plan.ranks_per_node * widest > MAX_INT:
            fail(f"{at}.layout.shape", f"makes the bucket larger than {MAX_INT} bytes")


def _check_placements(plan: Plan) -> None:
    if len(plan.placements) != len(plan.buckets):
        fail("placements", f"has {len(plan.placements)} entries for {len(plan.buckets)} buckets")
    for i, (placement, bucket) in enumerate(zip(plan.placements, plan.buckets, strict=True)):
        if placement.bucket != bucket.id:
            fail(
                f"placements[{i}].bucket", f"is {placement.bucket}, but buckets[{i}] is {bucket.id}"
            )


def _check_ranks(layout: ParamLayout, home: Scope, plan: Plan, path: str) -> None:
    nodes = plan.nodes if home is Scope.GLOBAL else 1
    ranks_per_node = 1 if home is Scope.NONE else plan.ranks_per_node
    of = f"home shards of scope {home.value} on {plan.nodes} x {plan.ranks_per_node} ranks have"
    if layout.nodes != nodes:
        fail(f"{path}.nodes", f"is {layout.nodes}, but {of} {nodes}")
    if layout.ranks_per_node != ranks_per_node:
        fail(f"{path}.ranks_per_node", f"is {layout.ranks_per_node}, but {of} {ranks_per_node}")


def _check_dtype(dtype: str, itemsize: int, path: str, prefix: str) -> None:
    if dtype not in ITEMSIZES:
        fail(f"{path}.{prefix}dtype", f"is {describe(dtype)}, not one of {', '.join(ITEMSIZES)}")
    if itemsize != ITEMSIZES[dtype]:
        fail(f"{path}.{prefix}itemsize", f"is {itemsize}, but {dtype} has {ITEMSIZES[dtype]}")


def _check_refresh(refresh: tuple[int, ...], ids: set[int]) -> None:
    seen: set[int] = set()
    for i, bucket_id in enumerate(refresh):
        _check_reference(bucket_id, ids, f"refresh[{i}]")
        if bucket_id in seen:
            fail(f"refresh[{i}]", f"is {bucket_id}, which is listed before")
        seen.add(bucket_id)


def _check_schedule(schedule: Schedule, ids: set[int], path: str) -> None:
    for i, step in enumerate(schedule.steps):
        at = f"{path}.steps[{i}]"
        if step.index != i:
            fail(f"{at}.index", f"is {step.index}, but this is step {i}")
        _check_step(step, ids, at)
    if schedule.memory_bytes and len(schedule.memory_bytes) != len(schedule.steps):
        fail(
            f"{path}.memory_bytes",
            f"has {len(schedule.memory_bytes)} entries for {len(schedule.steps)} steps",
        )


def _check_step(step: Step, ids: set[int], path: str) -> None:
    lane = LANES[step.kind]
    if step.lane is not lane:
        fail(f"{path}.lane", f"is {step.lane.value}, but {step.kind.value} runs on {lane.value}")
    if step.bucket is not None:
        _check_reference(step.bucket, ids, f"{path}.bucket")
    elif step.kind is not Kind.COMPUTE:
        fail(f"{path}.bucket", f"is null, but {step.kind.value} needs a bucket")
    if step.bytes and lane is Lane.COMPUTE:
        fail(f"{path}.bytes", f"is {step.bytes}, but {step.kind.value} moves nothing")
    accesses = step.accessed_bytes and step.kind is not Kind.INTRA_REST_ALL_GATHER
    computes = step.flops or step.kernel_bytes or step.inner_bytes or accesses
    if computes and step.kind is not Kind.COMPUTE:
        fail(f"{path}.flops", f"says that {step.kind.value} computes, but it does not")
    for i, wait in enumerate(step.waits):
        if wait >= step.index:
            fail(f"{path}.waits[{i}]", f"is {wait}, which is not an earlier step")
    if len(set(step.waits)) != len(step.waits):
        fail(f"{path}.waits", "lists a step twice")


def _check_reference(bucket_id: int, ids: set[int], path: str) -> None:
    if bucket_id not in ids:
        fail(path, f"is {bucket_id}, but the plan has no bucket {bucket_id}")


def _check_positive(value: int, path: str) -> None:
    if value < 1:
        fail(path, f"is {value}, but must be at least 1")
