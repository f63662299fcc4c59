"""The steps of a training step as tasks: how long they take alone, and which links they share with others.

[Note: phases of a task]
    latency | bytes move, more slowly while others use their links | parts are put in order

A card sends one collective of its node at a time, the inter lane's, and the g ranks of the node have equal
parts of it; so no other task slows it down.  Links to host memory and within the node are shared, see
`sharing`.  A link that only one lane uses has no flows to share it: its tasks always take equal time.

[Note: inner collectives]
Collectives of the model itself (`Step.inner_bytes`) are parts of compute steps, and a plan does not say where
in a step they are.  They are simulated together, between two halves of the step's work: at its beginning they
would meet every transfer that starts together with the step, at its end none of them.  The first half counts
as latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fcdp_compile.plan import Kind, Lane, Schedule, Step
from fcdp_compile.plan.cost import Link, Machine
from fcdp_compile.tools.simulator.rings import Collectives, ring_bytes, within_rings
from fcdp_compile.tools.simulator.sharing import Demand, LinkUse, Sharing


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """N = `nodes` nodes of g = `ranks_per_node` ranks, and the speeds of their links.

    machine: its h2d and d2h are of one link to host memory.  sharers: the most ranks at such a link.
    intra_over_host_link: whether transfers between ranks of a node use these links too.
    """

    machine: Machine
    nodes: int
    ranks_per_node: int
    sharers: int = 1
    intra_over_host_link: bool = False

    @property
    def sharing(self) -> Sharing:
        """The capacities of links that ranks and lanes share."""
        return Sharing({lane: link.bytes_per_s for lane, link in self.links.items()})

    @property
    def links(self) -> dict[Lane, Link]:
        """The links that ranks and lanes share, by the lane that each is for."""
        machine = self.machine
        return {Lane.INTRA: machine.intra, Lane.H2D: machine.h2d, Lane.D2H: machine.d2h}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A step as a simulated rank sees it.

    lane, waits: of the step; waits are positions in the whole training step.  is_compute: whether it is a
    compute step.  is_joint: whether all nodes take part, so that it begins with the last node and ends for
    all together.  alone_s: seconds while nothing else uses its links.  latency_s, after_s: the parts of
    alone_s before and after its bytes move.  work_s: the part that stragglers slow down.  demand: the demand
    on links that other lanes use too; None if there are no such links.  sent_bytes: bytes over the card of
    each node.
    """

    lane: Lane
    alone_s: float
    waits: tuple[int, ...] = ()
    is_compute: bool = False
    is_joint: bool = False
    latency_s: float = 0.0
    after_s: float = 0.0
    work_s: float = 0.0
    demand: Demand | None = None
    sent_bytes: int = 0


def tasks_of(
    parts: Sequence[Schedule],
    cluster: Cluster,
    collectives: Collectives = Collectives.HIERARCHICAL,
) -> list[Task]:
    """Return the tasks of schedules that run one after the other.

    Raises: the errors of `ring_bytes`.
    """
    tasks: list[Task] = []
    is_ring = collectives is Collectives.RING and cluster.nodes > 1
    for part in parts:
        first, steps = len(tasks), part.steps
        within = within_rings(steps) if is_ring else frozenset()
        for position, step in enumerate(steps):
            if position in within:
                task = Task(lane=step.lane, alone_s=0.0)
            elif is_ring and step.lane is Lane.INTER:
                task = _ring_task(step, cluster)
            else:
                task = _task(step, cluster)
            tasks.append(replace(task, waits=tuple(first + w for w in step.waits)))
    return _without_meetings(tasks, cluster)


def _task(step: Step, cluster: Cluster) -> Task:
    """Return a step's task as planned: `Machine.time_s`, split into phases."""
    machine = cluster.machine
    alone_s = machine.time_s(step, cluster.ranks_per_node)
    work_s = machine.work_s(step)
    if step.lane is Lane.COMPUTE:
        return Task(
            lane=step.lane,
            alone_s=alone_s,
            is_compute=step.kind is Kind.COMPUTE,
            latency_s=work_s / 2 + machine.intra.latency_s,
            after_s=work_s / 2,
            work_s=work_s,
            demand=_demand(Lane.INTRA, machine.intra, cluster) if step.inner_bytes else None,
        )
    if step.lane is Lane.INTER:
        sent = step.bytes * cluster.ranks_per_node
        return Task(lane=step.lane, alone_s=alone_s, is_joint=True, sent_bytes=sent)
    link = cluster.links[step.lane]
    return Task(
        lane=step.lane,
        alone_s=alone_s,
        latency_s=link.latency_s,
        after_s=work_s,
        work_s=work_s,
        demand=_demand(step.lane, link, cluster) if step.bytes else None,
    )


def _ring_task(step: Step, cluster: Cluster) -> Task:
    """Return the task of a collective between nodes that runs as a flat ring: [Note: rings]."""
    machine, ranks = cluster.machine, cluster.nodes * cluster.ranks_per_node
    sent = ring_bytes(step, cluster.nodes, cluster.ranks_per_node)
    if cluster.ranks_per_node == 1:
        return _task(step, cluster)
    more_hops_s = ((ranks - 1) / (cluster.nodes - 1) - 1) * machine.inter.latency_s
    moving_s = max(machine.inter.time_s(sent), machine.intra.time_s(sent))
    slower = max((machine.inter, machine.intra), key=lambda link: link.time_s(sent))
    return Task(
        lane=step.lane,
        alone_s=moving_s + (more_hops_s if sent else 0.0),
        is_joint=True,
        latency_s=slower.latency_s + more_hops_s,
        demand=_demand(Lane.INTRA, slower, cluster) if sent else None,
        sent_bytes=sent,
    )


def _demand(lane: Lane, slowest: Link, cluster: Cluster) -> Demand:
    """Return the demand of a rank's flow on shared links, at the speed of its slowest link."""
    to_host = (Lane.H2D, Lane.D2H)
    if lane in to_host:
        use = LinkUse(lane, cluster.sharers)
        return Demand(peak_bytes_per_s=slowest.bytes_per_s, uses=(use,))
    # A card that is slower only by its latency may have more bytes/s: a weight below 1 keeps to the link's.
    weight = min(1.0, cluster.machine.intra.bytes_per_s / slowest.bytes_per_s)
    uses = [LinkUse(Lane.INTRA, weight)]
    if cluster.intra_over_host_link:  # up from one rank, down to the next
        uses += [LinkUse(x, weight * cluster.sharers) for x in to_host]
    return Demand(peak_bytes_per_s=slowest.bytes_per_s, uses=tuple(uses))


def _without_meetings(tasks: list[Task], cluster: Cluster) -> list[Task]:
    """Return the tasks, those whose links no other lane uses with their final times and without demand."""
    lanes: dict[Lane, list[Lane]] = {}
    for task in tasks:
        for use in task.demand.uses if task.demand else ():
            lanes.setdefault(use.link, []).append(task.lane)
    met = [link for link, users in lanes.items() if len(set(users)) > 1]
    sharing = cluster.sharing
    return [_unless_met(task, met, sharing) for task in tasks]


def _unless_met(task: Task, met: Sequence[Lane], sharing: Sharing) -> Task:
    if task.demand is None or any(use.link in met for use in task.demand.uses):
        return task
    (speed,) = sharing.speeds((task.demand,))
    moving_s = task.alone_s - task.latency_s - task.after_s
    slower_s = moving_s / speed - moving_s
    return replace(task, alone_s=task.alone_s + slower_s, demand=None)
