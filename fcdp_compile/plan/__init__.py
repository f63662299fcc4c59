"""Plans as data: the records of a plan, its JSON file, and its costs."""

from fcdp_compile.plan.records import (
    INNER,
    LANES,
    SCHEMA,
    Bucket,
    BucketParam,
    Direction,
    Kind,
    Lane,
    Placement,
    Plan,
    Schedule,
    Step,
    Tier,
    Variant,
)

__all__ = [
    "INNER",
    "LANES",
    "SCHEMA",
    "Bucket",
    "BucketParam",
    "Direction",
    "Kind",
    "Lane",
    "Placement",
    "Plan",
    "Schedule",
    "Step",
    "Tier",
    "Variant",
]
