"""fcdp's performance targets on the 2 x 2 machine, and whether the measurements meet them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.reporting.rows import Cell
from benchmarks.reporting.summary import Summary
from benchmarks.systems.names import BY_NAME, SYSTEMS, ShardedOver

OURS = "fcdp"
_PEERS = [s for s in SYSTEMS if not s.is_ours and not s.in_bf16]
_FSDP2_AND_DEEPSPEED = [s.name for s in _PEERS if s.name.startswith(("fsdp2", "ds-"))]
_EQUAL_MEMORY = [s.name for s in _PEERS if s.state is ShardedOver.GLOBAL]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetVerdict:
    """A target: `found` must not exceed `limit`; both are ratios.

    found: None if a measurement is missing.  detail: the figures behind `found`, or which ones are missing.
    """

    target: str
    limit: float
    found: float | None
    detail: str

    @property
    def text(self) -> str:
        """Whether the target is met, missed (and by how much) or not measured."""
        if self.found is None:
            return "not measured"
        if self.found <= self.limit:
            return "met"
        return f"missed by {100 * (self.found / self.limit - 1):.0f} %"


def judge(cells: Mapping[Cell, Summary]) -> list[TargetVerdict]:
    """Judge every target; cells with wrong losses count as not measured."""
    right = {cell: summary for cell, summary in cells.items() if summary.is_right}
    accumulations = sorted({cell.accumulation for cell in cells})
    verdicts = []
    for k in accumulations:
        ours = right.get(Cell(OURS, "lora", k, "100mbit"))
        verdicts.append(
            _times(
                f"LoRA, accumulation {k}: step at 100 Mbit/s against its own on an unlimited network",
                1.05,
                ours,
                right.get(Cell(OURS, "lora", k, "unlimited")),
            )
        )
    verdicts.append(_bytes(right))
    for k in accumulations:
        verdicts += _full_at_100mbit(right, k)
    for network in ("1gbit", "unlimited"):
        for mode in ("lora", "full"):
            for k in accumulations:
                verdicts.append(
                    _against_best(
                        f"{_MODES[mode]}, accumulation {k}: step on {_NETWORKS[network]} against the "
                        "fastest of FSDP2 and DeepSpeed",
                        right,
                        Cell(OURS, mode, k, network),
                        _FSDP2_AND_DEEPSPEED,
                    )
                )
    return verdicts


_MODES = {"lora": "LoRA", "full": "full fine-tuning"}
_NETWORKS = {
    "100mbit": "100 Mbit/s",
    "1gbit": "1 Gbit/s",
    "unlimited": "an unlimited network",
}


def _bytes(cells: Mapping[Cell, Summary]) -> TargetVerdict:
    target = "full fine-tuning, accumulation 1: bytes sent against FSDP2's"
    found = [
        (cells[ours].sent_bytes, cells[theirs].sent_bytes)
        for network in ("unlimited", "1gbit", "100mbit")
        if (ours := Cell(OURS, "full", 1, network)) in cells
        if (theirs := Cell("fsdp2", "full", 1, network)) in cells
    ]
    if not found:
        return TargetVerdict(target=target, limit=1 / 3, found=None, detail="no such pair of rows")
    ours_bytes, theirs_bytes = found[0]
    return TargetVerdict(
        target=target,
        limit=1 / 3,
        found=ours_bytes / theirs_bytes,
        detail=f"{ours_bytes / 1e6:.1f} MB against {theirs_bytes / 1e6:.1f} MB",
    )


def _full_at_100mbit(cells: Mapping[Cell, Summary], accumulation: int) -> list[TargetVerdict]:
    cell = Cell(OURS, "full", accumulation, "100mbit")
    start = f"full fine-tuning, accumulation {accumulation}: step at 100 Mbit/s"
    ours = cells.get(cell)
    bound = f"{start} against max(compute, bytes / bandwidth)"
    if ours is None:
        lower = TargetVerdict(target=bound, limit=1.15, found=None, detail="no such row")
    else:
        floor_s = max(ours.accumulated_compute_s, ours.transfer_s)
        lower = TargetVerdict(
            target=bound,
            limit=1.15,
            found=ours.step_s / floor_s,
            detail=f"{ours.step_s:.2f} s; compute {ours.accumulated_compute_s:.2f} s, "
            f"network {ours.transfer_s:.2f} s",
        )
    fsdp2 = cells.get(Cell("fsdp2", "full", accumulation, "100mbit"))
    return [
        lower,
        _times(f"{start} against FSDP2's", 0.33, ours, fsdp2),
        _against_best(
            f"{start} against the fastest peer that shards over all ranks too",
            cells,
            cell,
            _EQUAL_MEMORY,
        ),
    ]


def _times(
    target: str, limit: float, ours: Summary | None, theirs: Summary | None
) -> TargetVerdict:
    if ours is None or theirs is None:
        return TargetVerdict(target=target, limit=limit, found=None, detail="no such pair of rows")
    return TargetVerdict(
        target=target,
        limit=limit,
        found=ours.step_s / theirs.step_s,
        detail=f"{ours.step_s:.2f} s against {theirs.step_s:.2f} s",
    )


def _against_best(
    target: str, cells: Mapping[Cell, Summary], cell: Cell, others: list[str]
) -> TargetVerdict:
    measured = [cells[theirs] for name in others if (theirs := cell._replace(system=name)) in cells]
    if cell not in cells or not measured:
        return TargetVerdict(target=target, limit=1.0, found=None, detail="no such rows")
    best = min(measured, key=lambda summary: summary.step_s)
    verdict = _times(target, 1.0, cells[cell], best)
    expected = [
        name for name in others if cell.accumulation > 1 or not BY_NAME[name].accumulating_only
    ]
    missing = len(expected) - len(measured)
    note = f"; {missing} of {len(expected)} peers not measured" if missing else ""
    return replace(verdict, detail=f"{verdict.detail} ({best.system.title}{note})")
