"""Plans as data: the records of a plan, its JSON file, and its costs."""

from fcdp_compile.plan.kinds import Kind, Lane
from fcdp_compile.plan.records import (
    INNER,
    SCHEMA,
    Bucket,
    BucketParam,
    Direction,
    Placement,
    Plan,
    Schedule,
    Step,
    Tier,
    Variant,
)

__all__ = [
    "INNER",
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
