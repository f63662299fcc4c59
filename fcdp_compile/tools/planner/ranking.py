"""Strategies compared for one job: which fit, which is fastest, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fcdp_compile.core.params.spec import bucket_strategy, fit_strategy
from fcdp_compile.errors import FcdpError
from fcdp_compile.strategy import Strategy
from fcdp_compile.tools.planner.estimate import Estimate, estimate, specs_of
from fcdp_compile.tools.planner.job import Job
from fcdp_compile.tools.planner.traced import TracedModel
from fcdp_compile.tools.simulator import Collectives, Conditions

SENSIBLE = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "zero++",
    "mics",
    "paro-nii",
    "paro-iig",
    "fcdp",
)
"""One strategy for each home, cache and life; other gradient scopes and lossy formats only on request."""

LAST = ("zero3+offload", "fcdp+offload")
"""Strategies for jobs that fit with nothing else, planned only then."""

_NEAR = 1.02  # smaller differences are ties: the model of time is no more accurate


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one strategy; the fields of `fcdp plan --format json`.

    strategy: its name, and the sizes of "cp" and "tp" if there are any.
    offloads: whether home shards are in host memory (`Strategy.offloads`).
    step_s: time of an optimizer step.  exposed_s: how long compute waits in an optimizer step.
    """

    strategy: str
    fits: bool
    peak_gpu_bytes: int
    offloads: bool
    host_bytes_per_node: int
    inter_bytes_per_step: int
    step_s: float
    exposed_s: float
    samples_per_s: float
    max_batch_per_gpu: int | None

    @property
    def sample_s(self) -> float:
        """Seconds for each sample of all ranks, by which rows with other numbers of samples are compared."""
        return 1 / self.samples_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Rows: strategies that fit come first, faster ones first, those with home shards on the host last.

    recommended: a strategy, None if nothing fits.  why: the reason, in one sentence.
    """

    rows: tuple[Row, ...]
    recommended: str | None
    why: str


def sensible(traced: TracedModel, job: Job, names: Sequence[str] = SENSIBLE) -> list[Strategy]:
    """Return the strategies of these names that the job's mesh can run.

    Of strategies that would do the same for this model and job, only the first is returned.
    """
    found: dict[frozenset[Strategy], Strategy] = {}
    for name in names:
        strategy = Strategy.parse(name)
        try:
            on_mesh = fit_strategy(strategy, job.mesh, shares_memory=job.profile.shares_memory)
        except ValueError:  # the strategy needs several nodes
            continue
        if job.accumulate == 1:  # no gradients accumulate, so their scope does not matter
            on_mesh = replace(on_mesh, gradient=on_mesh.home)
        specs = specs_of(traced, replace(on_mesh, name=""), job.mesh)
        frozen = {p.key for p in traced.params if not p.requires_grad}
        used = frozenset(
            bucket_strategy(spec, is_frozen=key in frozen) for key, spec in specs.items()
        )
        found.setdefault(used, strategy)
    return list(found.values())


def estimates(
    traced: TracedModel,
    strategies: Sequence[Strategy],
    job: Job,
    note: Callable[[str], None] = lambda what: None,
) -> list[Estimate]:
    """Plan each strategy.

    note: called with each stage that begins.

    Raises: FcdpError for a strategy that makes no sense for the job.
    """
    found = []
    for number, strategy in enumerate(strategies, 1):
        note(f"planning {strategy.name} ({number} of {len(strategies)})")
        try:
            found.append(estimate(traced, strategy, job))
        except ValueError as error:
            raise FcdpError(str(error)) from None
    return found


def planned(
    traced: TracedModel,
    job: Job,
    strategies: Sequence[Strategy] = (),
    note: Callable[[str], None] = lambda what: None,
) -> list[Estimate]:
    """Plan these strategies; without any, the sensible ones, and those of `LAST` if nothing else fits."""
    if strategies:
        return estimates(traced, strategies, job, note)
    found = estimates(traced, sensible(traced, job), job, note)
    if not any(e.fits for e in found):
        found += estimates(traced, sensible(traced, job, LAST), job, note)
    return found


def rank(
    found: Sequence[Estimate],
    *,
    collectives: Collectives = Collectives.HIERARCHICAL,
    conditions: Conditions | None = None,
) -> Ranking:
    """Simulate the strategies, sort them and recommend one."""
    rows = [_row(e, collectives, conditions) for e in found]
    rows.sort(key=lambda r: (not r.fits, r.offloads, r.sample_s, r.peak_gpu_bytes))
    fitting = [r for r in rows if r.fits]
    if not fitting:
        return Ranking(rows=tuple(rows), recommended=None, why=_why_nothing(found, rows))
    # Among equally fast strategies, prefer the one that leaves most room.
    first = fitting[0]
    near = [
        r for r in fitting if r.offloads == first.offloads and r.sample_s <= _NEAR * first.sample_s
    ]
    best = min(near, key=lambda r: r.peak_gpu_bytes)
    return Ranking(rows=tuple(rows), recommended=best.strategy, why=_why(best, rows))


def _row(found: Estimate, collectives: Collectives, conditions: Conditions | None) -> Row:
    step = found.simulate(collectives, conditions)
    return Row(
        strategy=found.strategy.name + found.job.inner,
        fits=found.fits,
        peak_gpu_bytes=found.peak_gpu_bytes,
        offloads=found.strategy.offloads,
        host_bytes_per_node=found.host_bytes_per_node,
        inter_bytes_per_step=step.bytes_sent_by_node * found.job.tp,
        step_s=step.step_s,
        exposed_s=step.exposed_s,
        samples_per_s=found.job.samples / step.step_s,
        max_batch_per_gpu=found.max_batch_per_gpu,
    )


def _why(best: Row, rows: Sequence[Row]) -> str:
    """Explain the recommendation: by memory, by bytes between nodes, or by neither."""
    others = [r for r in rows if r.strategy != best.strategy]
    faster = [r for r in others if not r.fits and r.sample_s < best.sample_s]
    fitting = [r for r in others if r.fits]
    text = f"{best.strategy} is the fastest that fits"
    if not best.offloads and any(r.sample_s < best.sample_s for r in fitting):
        text += " with home shards on the GPU"
    if not fitting:
        text = f"{best.strategy} is the only one that fits" if others else f"{best.strategy} fits"
    elif (ratio := fitting[0].sample_s / best.sample_s) < _NEAR:
        text = f"{best.strategy} is as fast as {fitting[0].strategy}{_taken(best, fitting[0])}"
    else:
        text += f", {ratio:.2f} times as fast as {fitting[0].strategy}: {_sent(best, fitting[0])}"
    if faster:
        names = ", ".join(r.strategy for r in faster)
        text += f"; {names} would be faster but {'does' if len(faster) == 1 else 'do'} not fit"
    return f"{text}; {_bound(best)}."


def _taken(best: Row, other: Row) -> str:
    mine, others = _gb(best.peak_gpu_bytes), _gb(other.peak_gpu_bytes)
    if mine == others:
        return " and needs as much GPU memory"
    return f" and needs {mine} of GPU memory instead of {others}"


def _sent(best: Row, other: Row) -> str:
    mine, theirs = _gb(best.inter_bytes_per_step), _gb(other.inter_bytes_per_step)
    if best.inter_bytes_per_step < other.inter_bytes_per_step:
        return f"a node sends {mine} a step instead of {theirs}"
    sends = f"a node sends {mine} a step" + (f" (not {theirs})" if mine != theirs else " as well")
    waits = f"compute waits {best.exposed_s:.3g} s instead of {other.exposed_s:.3g} s"
    return f"{sends}, but {waits}"


def _bound(best: Row) -> str:
    part = best.exposed_s / best.step_s
    if part < 0.1:
        return "communication overlaps almost completely with compute"
    return f"compute stands still for {part:.0%} of the step"


def _why_nothing(found: Sequence[Estimate], rows: Sequence[Row]) -> str:
    if not rows:
        return "no strategy was asked for."
    least = min(rows, key=lambda r: r.peak_gpu_bytes)
    job = found[0].job
    smaller = [r for r in rows if 0 < (r.max_batch_per_gpu or 0) < job.batch]
    if smaller:
        most = max(smaller, key=lambda r: r.max_batch_per_gpu or 0)
        remedy = f"with {most.strategy} a batch of {most.max_batch_per_gpu} a GPU would"
    else:
        remedy = "use more nodes, larger GPUs or --lora"
    return (
        f"nothing fits: even {least.strategy}, which needs the least GPU memory, needs "
        f"{_gb(least.peak_gpu_bytes)} per GPU ({_gb(job.device_bytes)} available) and "
        f"{_gb(least.host_bytes_per_node)} of host memory per node "
        f"({_gb(job.host_bytes_per_rank * job.ranks_per_node)} available); {remedy}."
    )


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3g} GB"
