"""How large a bucket should be, from the link between nodes; arithmetic only."""

from __future__ import annotations

import math

from fcdp_compile.errors import ArgumentError

MIN_BYTES = 1 << 17
"""Below, the executor's own work for each bucket would count."""

MAX_BYTES = 1 << 28
"""Above, a few buckets in flight would hold a noticeable part of the memory; the gain is below 1 %."""


def bucket_bytes(total_bytes: int, *, latency_s: float, bytes_per_s: float) -> int:
    """The bucket size b that costs a pass over W = `total_bytes` of parameters the least time.

    With a link of latency a and bandwidth B, W / b messages take a * W / b + W / B.  All but one hide behind
    compute: the first gather of a forward, or the last reduction of a backward, has none to hide behind and
    is exposed for b / B.  What depends on b,

        a * W / b + b / B,    is least at    b* = sqrt(W * a * B).

    Small buckets pay latency, large ones exposure; both terms are then equal.  The result is rounded down to
    whole KiB and kept between MIN_BYTES and MAX_BYTES.  It must be the same on all ranks, so latency and
    bandwidth are given or agreed, never one rank's measurement.

    Raises: ValueError if the link's numbers are not finite, the latency below or the bandwidth not above 0.
    """
    if not (0 <= latency_s < math.inf and 0 < bytes_per_s < math.inf):
        raise ArgumentError(
            f"a link of latency {latency_s} s and {bytes_per_s} B/s cannot size buckets; both must be "
            "finite, the bandwidth above zero"
        )
    best = int(math.sqrt(total_bytes * latency_s * bytes_per_s)) >> 10 << 10
    return min(max(best, MIN_BYTES), MAX_BYTES)
