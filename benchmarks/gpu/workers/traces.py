"""Read from a Chrome trace of the profiler when the compute stream was idle.

    cuda_runtime   launches, on the Python thread; `correlation` is the number of the launched kernel
    kernel         on the GPU; the compute stream is the stream that is busy longest

Without a GPU, operators on the forward's thread take the place of kernels: a trial of the code, no finding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.results import Gaps

FORWARD = "benchmark forward"
"""The name of the profiler's range around a forward."""

_Event = Mapping[str, Any]
_KEPT = ("kernel", "gpu_memcpy", "gpu_memset", "user_annotation", "gpu_user_annotation")


class _Span(NamedTuple):
    start: float
    end: float
    correlation: int | None


def kept_events(events: Iterable[_Event]) -> list[_Event]:
    """Keep the events that show where time goes: kernels, copies, named ranges, and the names of rows."""
    return [e for e in events if e.get("cat") in _KEPT or e.get("ph") == "M"]


def gaps_of(events: Sequence[_Event], *, has_kernels: bool) -> Gaps:
    """Find the idle times of the compute stream.

    Raises: ValueError for a trace without a forward or without kernels.
    """
    forwards = [e for e in events if e.get("cat") == "user_annotation" and e.get("name") == FORWARD]
    if not forwards:
        raise ValueError(f"the trace has no range {FORWARD!r}")
    if has_kernels:
        kernels = _longest(_rows(events, "kernel"))
        launches = [_span(e) for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    else:
        kernels = _outermost(_rows(events, "cpu_op")[forwards[0]["tid"]])
        launches = kernels
    if not kernels:
        raise ValueError("the trace has no kernels")
    gaps = []
    for forward in map(_span, forwards):
        within = {s.correlation for s in launches if forward.start <= s.start < forward.end}
        first = next((i for i, k in enumerate(kernels) if k.correlation in within), None)
        if first:  # no gap before the very first kernel
            gaps.append(max(0.0, kernels[first].start - max(k.end for k in kernels[:first])))
    return Gaps(forward_start_us=gaps, idle_part=_idle_part(kernels), kernels=len(kernels))


def _rows(events: Iterable[_Event], category: str) -> dict[object, list[_Span]]:
    """Return the spans of a category by stream or thread, sorted by time."""
    rows: dict[object, list[_Span]] = defaultdict(list)
    for i, event in enumerate(events):
        if event.get("cat") == category and event.get("ph") == "X":
            span = _span(event)
            rows[event["tid"]].append(
                span if category == "kernel" else span._replace(correlation=i)
            )
    for spans in rows.values():
        spans.sort()
    return rows


def _span(event: _Event) -> _Span:
    start = float(event["ts"])
    return _Span(
        start, start + float(event.get("dur", 0)), event.get("args", {}).get("correlation")
    )


def _longest(rows: Mapping[object, list[_Span]]) -> list[_Span]:
    return max(rows.values(), key=lambda spans: sum(s.end - s.start for s in spans), default=[])


def _outermost(spans: Iterable[_Span]) -> list[_Span]:
    """Keep the spans that lie within no other span."""
    found: list[_Span] = []
    for span in spans:
        if not found or span.start >= found[-1].end:
            found.append(span)
    return found


def _idle_part(kernels: Sequence[_Span]) -> float:
    busy, until = 0.0, kernels[0].start
    for kernel in kernels:
        busy += max(0.0, kernel.end - max(until, kernel.start))
        until = max(until, kernel.end)
    whole = until - kernels[0].start
    return 1 - busy / whole if whole else 0.0
