"""The plan of a benchmark: its cells, their order and their numbers of steps, from estimates before any run.

Every cell gets an equal share of time: many steps if a step is short, one if a step takes minutes.  The share
is the largest that fits into the budget.  If not even one step of each cell fits, the dearest cells are left
out, twins' cells first, and the report lists them with their expected time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.reporting.rows import Cell
from benchmarks.running.job import BenchmarkJob, TimedSteps
from benchmarks.running.network import NETWORKS
from benchmarks.systems.names import BY_NAME, SYSTEMS, System
from benchmarks.systems.shape import Shape

MODES = ("lora", "full")
ACCUMULATIONS = (1, 8)
CHECK_STEPS = {1: 3}
"""Number of check steps, by accumulation; one for every other accumulation."""

MAX_STEPS = 7
_SHORT_S = 4.0  # a step up to this long is always repeated
_LORA_SHARE = 0.0075  # of the default shape's parameters; an estimate for planning only
_SHARES_S = (240, 120, 80, 60, 45, 35, 28, 22, 18, 14, 11, 8, 6, 4, 3, 2, 1, 0)


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Expected durations on this machine; the defaults are for two cores and 2 x 2 ranks.

    launch_s: start of a job until training can begin.  micro_batch_s: compute of one micro-batch of every
    rank, full fine-tuning; LoRA takes two thirds.
    """

    shape: Shape
    launch_s: float = 14.0
    flops_per_s: float = 60e9
    ranks: int = 4

    @cached_property
    def micro_batch_s(self) -> float:
        """Seconds for six operations per parameter and token; all ranks share the cores."""
        values = self.shape.approximate_bytes / 4
        return 6 * values * self.shape.tokens * self.ranks / self.flops_per_s

    def step_s(self, cell: Cell) -> float:
        """Return the expected time of one step: compute, then the network."""
        system = BY_NAME[cell.system]
        all_bytes = self.shape.approximate_bytes
        trained = all_bytes if cell.mode == "full" else int(_LORA_SHARE * all_bytes)
        sent = system.traffic.step_bytes(
            all_bytes=all_bytes, trained_bytes=trained, accumulation=cell.accumulation
        )
        compute = cell.accumulation * self.micro_batch_s * (1.0 if cell.mode == "full" else 2 / 3)
        return 0.05 + compute + NETWORKS[cell.network].transfer_s(sent)

    def job_s(self, job: BenchmarkJob) -> float:
        """Return the expected time of a whole launch."""
        total = self.launch_s + BY_NAME[job.system].compile_s
        for accumulation, steps in job.check_steps.items():
            cell = Cell(job.system, job.mode, accumulation, "unlimited")
            total += steps * self.step_s(cell)
        for timed in job.timed:
            cell = Cell(job.system, job.mode, timed.accumulation, timed.network)
            total += timed.steps * self.step_s(cell)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A cell that does not fit into the time; step_s: how long one of its steps would take."""

    cell: Cell
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """The jobs in the order in which they run, and the cells left out."""

    jobs: list[BenchmarkJob]
    skipped: list[Skipped]
    expected_s: float


def all_cells(
    *,
    systems: Sequence[str] = tuple(s.name for s in SYSTEMS),
    modes: Sequence[str] = MODES,
    accumulations: Sequence[int] = ACCUMULATIONS,
    networks: Sequence[str] = tuple(NETWORKS),
) -> list[Cell]:
    """Return the matrix's cells; systems that differ only in accumulating get no cell at accumulation 1."""
    return [
        Cell(system.name, mode, accumulation, network)
        for system in SYSTEMS
        if system.name in systems
        for mode in modes
        if mode in system.modes
        for accumulation in accumulations
        if accumulation > 1 or not system.accumulating_only
        for network in networks
    ]


def plan(
    cells: Sequence[Cell],
    *,
    shape: Shape,
    costs: Durations,
    budget_s: float,
    rounds: int = 2,
    nodes: int = 2,
    ranks_per_node: int = 2,
) -> JobOrder:
    """Fit the cells into the budget.

    rounds: passes over all systems; fewer if only then everything fits.  The steps of a cell are spread over
    the rounds; a cell with fewer steps than rounds is measured in the first rounds only.

    Raises: ValueError if there is nothing to plan.
    """
    if not cells or rounds < 1 or budget_s <= 0:
        raise ValueError(
            f"{len(cells)} cells in {rounds} rounds and {budget_s:.0f} s leave nothing to measure; "
            "choose at least one cell, one round and a positive time"
        )
    kept = list(cells)
    skipped: list[Skipped] = []

    def fit(rounds: int, share_s: float) -> JobOrder:
        steps = {cell: _steps(share_s, costs.step_s(cell)) for cell in kept}
        jobs = _jobs(steps, shape=shape, rounds=rounds, nodes=nodes, ranks_per_node=ranks_per_node)
        expected_s = sum(costs.job_s(job) for job in jobs)
        return JobOrder(jobs=jobs, skipped=skipped, expected_s=expected_s)

    while fit(1, 0.0).expected_s > budget_s and len(kept) > 1:
        dearest = max(kept, key=lambda cell: _dearness(BY_NAME[cell.system], costs.step_s(cell)))
        kept.remove(dearest)
        skipped.append(Skipped(cell=dearest, step_s=costs.step_s(dearest)))
    for tried in range(rounds, 0, -1):
        for share_s in _SHARES_S:
            schedule = fit(tried, share_s)
            if schedule.expected_s <= budget_s:
                return schedule
    return fit(1, 0.0)  # a single cell, however long it takes


def _dearness(system: System, step_s: float) -> float:
    # A twin sends as much as its sibling, whose measurement on a slow network holds for both.
    return step_s * (4 if system.is_twin else 1)


def _steps(share_s: float, step_s: float) -> int:
    least = 3 if step_s <= _SHORT_S else 1
    return max(least, min(MAX_STEPS, int(share_s / step_s)))


def _jobs(
    steps: dict[Cell, int], *, shape: Shape, rounds: int, nodes: int, ranks_per_node: int
) -> list[BenchmarkJob]:
    jobs = []
    for number in range(rounds):
        for mode in dict.fromkeys(cell.mode for cell in steps):
            for system in dict.fromkeys(cell.system for cell in steps):
                timed = [
                    TimedSteps(
                        accumulation=cell.accumulation,
                        network=cell.network,
                        steps=share,
                    )
                    for cell, count in steps.items()
                    if (cell.system, cell.mode) == (system, mode)
                    if (share := _share(count, number, rounds))
                ]
                if not timed:
                    continue
                jobs.append(
                    BenchmarkJob(
                        system=system,
                        mode=mode,
                        round=number,
                        shape=shape,
                        nodes=nodes,
                        ranks_per_node=ranks_per_node,
                        check_steps=_check_steps(timed),
                        timed=timed,
                    )
                )
    return jobs


def _share(count: int, number: int, rounds: int) -> int:
    """Return how many of `count` steps a round takes; the first rounds take the remainder."""
    return count // rounds + (number < count % rounds)


def _check_steps(timed: Sequence[TimedSteps]) -> dict[int, int]:
    # Accumulation 1 always: it compiles, and all launches begin with it.
    needed = {1, *(t.accumulation for t in timed)}
    return {accumulation: CHECK_STEPS.get(accumulation, 1) for accumulation in sorted(needed)}
