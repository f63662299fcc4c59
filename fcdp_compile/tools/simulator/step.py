"""Schedules in time: one on one rank, or those of a training step on N nodes of g ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fcdp_compile.cluster.profile import ClusterProfile
from fcdp_compile.errors import ArgumentError
from fcdp_compile.plan import Bucket, Direction, Lane, Schedule, Step
from fcdp_compile.plan.cost import Machine, Slot, Timeline, agreement_s
from fcdp_compile.plan.kinds import REDUCING
from fcdp_compile.tools.simulator.conditions import Conditions, Jitter, NodeClass, fold
from fcdp_compile.tools.simulator.engine import Engine
from fcdp_compile.tools.simulator.rank import SimulatedRank
from fcdp_compile.tools.simulator.rings import Collectives
from fcdp_compile.tools.simulator.tasks import Cluster, Task, tasks_of

AS_MEASURED = Conditions()
"""All nodes are as in the profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedNodes:
    """Nodes in the same state; times are those of one rank.

    nodes: how many.  slowdown, inter_factor: the factors on the time of their compute and on the bandwidth of
    their cards (`Conditions`).  end_s: when they have completed the whole step.  busy_s: how long each lane
    is busy, without waiting for other nodes; the optimizer counts as compute.
    """

    nodes: int
    slowdown: float
    inter_factor: float
    end_s: float
    busy_s: Mapping[Lane, float]

    @property
    def exposed_s(self) -> float:
        """How long compute waits before these nodes end."""
        return self.end_s - self.busy_s[Lane.COMPUTE]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """The times of a training step.

    step_s: the time until all nodes have completed the step.  slowest: the nodes that end last; if these
    differ, the nodes with the most compute.  parts: for these nodes, a timeline for each schedule.  Its slots
    count from the beginning of the step, and a collective's slot begins when these nodes are ready for it;
    total_s is until the next part begins, so lanes may be busy for longer; the last part excludes the
    optimizer.  optimizer_s: the optimizer's time on the slowest.
    bytes_sent_by_node: over the card of each node.
    classes: nodes by state; with jitter, each node by itself.  agreements_s: the time in which ranks agree on
    what to run, over all forwards; not in step_s, because devices meanwhile finish earlier work.
    """

    step_s: float
    slowest: SimulatedNodes
    parts: tuple[Timeline, ...]
    optimizer_s: float
    bytes_sent_by_node: int
    classes: tuple[SimulatedNodes, ...]
    agreements_s: float

    @property
    def busy_s(self) -> Mapping[Lane, float]:
        """How long each lane of the slowest nodes is busy."""
        return self.slowest.busy_s

    @property
    def exposed_s(self) -> float:
        """How long compute of the slowest nodes waits."""
        return self.slowest.exposed_s


def simulate(schedule: Schedule, machine: Machine, ranks_per_node: int) -> Timeline:
    """Predict the times of a schedule on one rank, which runs it as the runtime does (`rank`).

    machine: its h2d and d2h are one rank's share of the links to host memory.
    """
    cluster = Cluster(machine=machine, nodes=1, ranks_per_node=ranks_per_node)
    tasks = tasks_of([schedule], cluster)
    (rank,) = Engine(tasks, cluster.sharing, longer_s=[[0.0] * len(tasks)]).run()
    total_s = max(rank.end_s, default=0.0)
    timeline = _timeline(schedule.steps, rank, 0, total_s=total_s)
    return replace(timeline, inner=_inner(schedule.steps, rank, machine))


def simulate_step(
    parts: Sequence[Schedule],
    profile: ClusterProfile,
    *,
    nodes: int,
    ranks_per_node: int,
    buckets: Mapping[int, Bucket],
    collectives: Collectives = Collectives.HIERARCHICAL,
    conditions: Conditions = AS_MEASURED,
    optimizer_bytes: int = 0,
    host_optimizer_bytes: int = 0,
) -> SimulatedStep:
    """Run the schedules of a training step one after the other: a forward, a backward, a warm forward, ...

    Each rank runs them as the runtime does (`rank`); work of a part that is still on its lanes continues
    during the next part.  Without shared links, and with equal nodes, a part takes the time of `simulate`.

    profile: `machine.h2d` and `machine.d2h` are of a link to host memory, which `ranks_per_host_link` ranks
    share; `machine.inter` is of a node's card.  nodes, ranks_per_node: N and g, for which the schedules were
    planned.  buckets: all buckets that the schedules name, by number.  optimizer_bytes: device memory that
    each rank's optimizer reads and writes, after the last part has ended and all gradients are reduced.
    host_optimizer_bytes: the same in host memory.

    Time and memory go with steps times classes of nodes ([Note: folding]); with jitter, times nodes.

    Raises: ValueError for nodes or ranks that do not fit the profile, the buckets, the schedules or the
    conditions, for steps of unknown buckets or that wait for later steps, and for optimizer_bytes below zero.
    """
    given = {"optimizer_bytes": optimizer_bytes, "host_optimizer_bytes": host_optimizer_bytes}
    for name, size in given.items():
        if size < 0:
            raise ArgumentError(f"{name} is {size}, but must be at least 0")
    cluster = _cluster_of(profile, nodes, ranks_per_node)
    classes = fold(conditions, nodes)
    cluster = replace(cluster, machine=_with_slowest_card(profile.machine, classes))
    for part in parts:
        for position, step in enumerate(part.steps):
            _check(step, position, cluster, buckets)
    tasks = tasks_of(parts, cluster, collectives)
    jitter = Jitter(conditions)
    engine = Engine(
        tasks,
        cluster.sharing,
        longer_s=[_longer_s(tasks, c, jitter) for c in classes],
    )
    ranks = engine.run()
    optimizer_s = optimizer_bytes / profile.machine.memory_bytes_per_s
    # Host memory was not measured; it can feed all ranks' buses at once, so it is at least as fast as they.
    optimizer_s += host_optimizer_bytes / profile.rank_machine.h2d.bytes_per_s
    forwards = sum(part.direction is not Direction.BACKWARD for part in parts)
    run = _Simulated(
        parts=parts,
        tasks=tasks,
        optimizer_s=optimizer_s,
        agreements_s=forwards * agreement_s(profile.machine, nodes, ranks_per_node),
    )
    return run.result(classes, ranks)


def _cluster_of(profile: ClusterProfile, nodes: int, ranks_per_node: int) -> Cluster:
    if nodes < 1:
        raise ArgumentError(f"nodes is {nodes}, but must be at least 1")
    most = profile.ranks_per_node
    if not 1 <= ranks_per_node <= most:
        raise ArgumentError(
            f"ranks_per_node is {ranks_per_node}, but a node of {profile.name!r} has 1 to {most}"
        )
    return Cluster(
        machine=profile.machine,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        # If some links have fewer, a step waits for the fullest links.
        sharers=min(profile.ranks_per_host_link, ranks_per_node),
        intra_over_host_link=profile.intra_over_host_link,
    )


def _check(step: Step, position: int, cluster: Cluster, buckets: Mapping[int, Bucket]) -> None:
    late = [w for w in step.waits if not 0 <= w < position]
    if late:
        raise ArgumentError(
            f"step {position} ({step.kind.value}) waits for step {late[0]}, which does not come before it"
        )
    if step.bucket is None:
        return
    if step.bucket not in buckets:
        raise ArgumentError(
            f"step {position} ({step.kind.value}) is of bucket {step.bucket}, which is not among the buckets"
        )
    bucket = buckets[step.bucket]
    nodes, ranks = cluster.nodes, cluster.ranks_per_node
    if bucket.nodes not in (1, nodes) or bucket.ranks_per_node not in (1, ranks):
        raise ArgumentError(
            f"bucket {bucket.id} is cut over {bucket.nodes} x {bucket.ranks_per_node} ranks, but {nodes} x "
            f"{ranks} are simulated; give the schedules that were planned for those"
        )


def _with_slowest_card(machine: Machine, classes: Sequence[NodeClass]) -> Machine:
    """Return the machine with the slowest node's card: it sets the speed of collectives of all nodes."""
    factor = min(c.inter_factor for c in classes)
    slowest = replace(machine.inter, bytes_per_s=machine.inter.bytes_per_s * factor)
    return replace(machine, inter=slowest)


def _longer_s(tasks: Sequence[Task], nodes: NodeClass, jitter: Jitter) -> list[float]:
    factors = (nodes.slowdown * (jitter.draw() if t.is_compute else 1.0) for t in tasks)
    return [t.work_s * (factor - 1.0) for t, factor in zip(tasks, factors, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Simulated:
    """The simulated schedules; computes the results from the ranks' times."""

    parts: Sequence[Schedule]
    tasks: Sequence[Task]
    optimizer_s: float
    agreements_s: float

    def result(self, classes: Sequence[NodeClass], ranks: Sequence[SimulatedRank]) -> SimulatedStep:
        ends = [self._end_s(c, rank) for c, rank in zip(classes, ranks, strict=True)]
        step_s = max(ends)
        figures = tuple(
            self._figures(c, rank, end_s)
            for c, rank, end_s in zip(classes, ranks, ends, strict=True)
        )
        last = [i for i, end_s in enumerate(ends) if end_s == step_s]
        slowest = max(last, key=lambda i: figures[i].busy_s[Lane.COMPUTE])
        return SimulatedStep(
            step_s=step_s,
            slowest=figures[slowest],
            parts=self._timelines(ranks[slowest]),
            optimizer_s=self.optimizer_s * classes[slowest].slowdown,
            bytes_sent_by_node=sum(t.sent_bytes for t in self.tasks),
            classes=figures,
            agreements_s=self.agreements_s,
        )

    def _end_s(self, nodes: NodeClass, rank: SimulatedRank) -> float:
        end_s = max(rank.end_s, default=0.0)
        if not self.optimizer_s:
            return end_s
        steps = [step for part in self.parts for step in part.steps]
        reduced_s = [e for e, step in zip(rank.end_s, steps, strict=True) if step.kind in REDUCING]
        ready_s = max(rank.now_s, *reduced_s, 0.0)
        return max(end_s, ready_s + self.optimizer_s * nodes.slowdown)

    def _figures(self, nodes: NodeClass, rank: SimulatedRank, end_s: float) -> SimulatedNodes:
        busy_s = _busy_s([task.lane for task in self.tasks], rank.busy_s)
        busy_s[Lane.COMPUTE] += self.optimizer_s * nodes.slowdown
        return SimulatedNodes(
            nodes=nodes.nodes,
            slowdown=nodes.slowdown,
            inter_factor=nodes.inter_factor,
            end_s=end_s,
            busy_s=busy_s,
        )

    def _timelines(self, rank: SimulatedRank) -> tuple[Timeline, ...]:
        firsts = list(accumulate((len(part.steps) for part in self.parts), initial=0))
        begins_s = [rank.came_s[i] if i < len(self.tasks) else rank.now_s for i in firsts]
        begins_s[-1] = max(rank.end_s, default=0.0)
        return tuple(
            _timeline(part.steps, rank, first, total_s=end_s - begin_s)
            for part, first, begin_s, end_s in zip(
                self.parts, firsts[:-1], begins_s[:-1], begins_s[1:], strict=True
            )
        )


def _timeline(
    steps: Sequence[Step], rank: SimulatedRank, first: int, *, total_s: float
) -> Timeline:
    positions = range(first, first + len(steps))
    return Timeline(
        slots=tuple(Slot(start_s=rank.start_s[i], end_s=rank.end_s[i]) for i in positions),
        busy_s=_busy_s([step.lane for step in steps], [rank.busy_s[i] for i in positions]),
        total_s=total_s,
    )


def _inner(steps: Sequence[Step], rank: SimulatedRank, machine: Machine) -> dict[int, Slot]:
    """Return when the model's own collectives run: `tasks` [Note: inner collectives]."""
    inner: dict[int, Slot] = {}
    for i, step in enumerate(steps):
        if step.inner_bytes:
            half_s = machine.work_s(step) / 2
            begin_s = rank.end_s[i] - rank.busy_s[i]
            inner[i] = Slot(start_s=begin_s + half_s, end_s=rank.end_s[i] - half_s)
    return inner


def _busy_s(lanes: Sequence[Lane], busy_s: Sequence[float]) -> dict[Lane, float]:
    totals = dict.fromkeys(Lane, 0.0)
    for lane, taken_s in zip(lanes, busy_s, strict=True):
        totals[lane] += taken_s
    return totals
