"""Choose the size of buckets for a link between nodes; arithmetic only."""

from __future__ import annotations

import math

from fcdp_compile.errors import ArgumentError

MIN_BYTES = 1 << 17
"""For smaller buckets, the executor's own work for each bucket would matter."""

MAX_BYTES = 1 << 28
"""A few larger buckets in flight would hold a noticeable part of the memory, for a gain below 1 %."""


def bucket_bytes(total_bytes: int, *, latency_s: float, bytes_per_s: float) -> int:
    """The bucket size b that minimises the time of a pass over W = `total_bytes` of parameters.

    With a link of latency a and bandwidth B, W / b messages take a * W / b + W / B.  Compute hides all
    messages but one: the first gather of a forward, or the last reduction of a backward, has no compute
    beside it and is exposed for b / B.  The terms that depend on b,

        a * W / b + b / B,    are least at    b* = sqrt(W * a * B).

    Small buckets cost latency, large ones exposure; at b* both terms are equal.  The result is rounded down
    to whole KiB and kept between MIN_BYTES and MAX_BYTES.  It must be the same on all ranks, so latency and
    bandwidth are given or agreed, never one rank's measurement.

    Raises: ValueError if latency or bandwidth is not finite, the latency below or the bandwidth not above 0.
    """
    if not (0 <= latency_s < math.inf and 0 < bytes_per_s < math.inf):
        raise ArgumentError(
            f"a link of latency {latency_s} s and {bytes_per_s} B/s cannot size buckets; both must be "
            "finite, the bandwidth above zero"
        )
    best = int(math.sqrt(total_bytes * latency_s * bytes_per_s)) >> 10 << 10
    return min(max(best, MIN_BYTES), MAX_BYTES)
