"""The kinds of steps: what each moves, its lane and its text, a row of `_KINDS` each.

docs/architecture.md, "A kind of step", says where else a new kind matters.
"""

from __future__ import annotations

from enum import Enum


class Lane(Enum):
    """The five resources a step can occupy."""

    COMPUTE = "compute"
    INTER = "inter"
    INTRA = "intra"
    H2D = "h2d"
    D2H = "d2h"


class Flow(Enum):
    """Weights or gradients, the link that they move over, and the direction."""

    WEIGHTS_BETWEEN = "weights_between"
    GRADIENTS_BETWEEN = "gradients_between"
    WEIGHTS_WITHIN = "weights_within"
    GRADIENTS_WITHIN = "gradients_within"
    WEIGHTS_TO_HOST = "weights_to_host"
    GRADIENTS_TO_HOST = "gradients_to_host"
    WEIGHTS_FROM_HOST = "weights_from_host"
    GRADIENTS_FROM_HOST = "gradients_from_host"

    @property
    def is_of_weights(self) -> bool:
        """Whether weights move, not gradients."""
        return self.value.startswith("weights")

    @property
    def lane(self) -> Lane:
        """The lane of the steps that move it."""
        return _LANES[self.value.partition("_")[2]]


_LANES = {
    "between": Lane.INTER,
    "within": Lane.INTRA,
    "to_host": Lane.D2H,
    "from_host": Lane.H2D,
}


class Kind(Enum):
    """The kind of a step; the name of its graph op, its counter, its profiler range and its dump line."""

    COMPUTE = "compute"
    INTER_ALL_GATHER = "inter_all_gather"
    INTRA_ALL_GATHER = "intra_all_gather"
    INTRA_OWN_ALL_GATHER = "intra_own_all_gather"
    INTRA_REST_ALL_GATHER = "intra_rest_all_gather"
    STORE = "store"
    LOAD = "load"
    LOAD_HOME = "load_home"
    WAIT = "wait"
    FREE = "free"
    COLLECT = "collect"
    ACCUMULATE = "accumulate"
    INTRA_REDUCE_SCATTER = "intra_reduce_scatter"
    INTER_REDUCE_SCATTER = "inter_reduce_scatter"
    INTER_ALL_REDUCE = "inter_all_reduce"
    INTRA_GRAD_ALL_GATHER = "intra_grad_all_gather"
    STORE_GRADS = "store_grads"

    @property
    def flow(self) -> Flow | None:
        """What the step moves; None if it moves nothing."""
        return _KINDS[self][0]

    @property
    def lane(self) -> Lane:
        """The lane that the step occupies."""
        return _LANE_OF[self]

    @property
    def text(self) -> str:
        """What the step does, in a few words."""
        return _KINDS[self][1]


_KINDS: dict[Kind, tuple[Flow | None, str]] = {
    Kind.COMPUTE: (None, "runs operators of the model"),
    Kind.INTER_ALL_GATHER: (
        Flow.WEIGHTS_BETWEEN,
        "collects a bucket's weights from the other nodes",
    ),
    Kind.INTRA_ALL_GATHER: (
        Flow.WEIGHTS_WITHIN,
        "collects the other parts from the other ranks of the node",
    ),
    Kind.INTRA_OWN_ALL_GATHER: (
        Flow.WEIGHTS_WITHIN,
        "collects the node's own parts within the node while the other parts cross",
    ),
    Kind.INTRA_REST_ALL_GATHER: (
        Flow.WEIGHTS_WITHIN,
        "collects the parts that came from other nodes within the node",
    ),
    Kind.STORE: (Flow.WEIGHTS_TO_HOST, "keeps gathered weights for their next use"),
    Kind.LOAD: (Flow.WEIGHTS_FROM_HOST, "takes weights from where they were kept"),
    Kind.LOAD_HOME: (
        Flow.WEIGHTS_FROM_HOST,
        "takes this rank's own weights out of host memory",
    ),
    Kind.WAIT: (None, "compute stands still until a transfer is done"),
    Kind.FREE: (None, "releases gathered weights"),
    Kind.COLLECT: (Flow.GRADIENTS_FROM_HOST, "adds gradients that waited"),
    Kind.ACCUMULATE: (Flow.GRADIENTS_TO_HOST, "lets gradients wait for the next micro-batch"),
    Kind.INTRA_REDUCE_SCATTER: (Flow.GRADIENTS_WITHIN, "averages gradients within the node"),
    Kind.INTER_REDUCE_SCATTER: (
        Flow.GRADIENTS_BETWEEN,
        "averages gradients between nodes, to their owners",
    ),
    Kind.INTER_ALL_REDUCE: (Flow.GRADIENTS_BETWEEN, "averages gradients between nodes"),
    Kind.INTRA_GRAD_ALL_GATHER: (
        Flow.GRADIENTS_WITHIN,
        "spreads averaged gradients within the node",
    ),
    Kind.STORE_GRADS: (
        Flow.GRADIENTS_TO_HOST,
        "brings averaged gradients to host memory, where the optimizer steps",
    ),
}

_LANE_OF = {kind: kind.flow.lane if kind.flow else Lane.COMPUTE for kind in Kind}

INTER_KINDS = tuple(kind for kind in Kind if kind.lane is Lane.INTER)
"""Collectives over the ranks at one place of every node; others run over the ranks of a node."""

FETCHES = frozenset(kind for kind in Kind if kind.flow is not None and kind.flow.is_of_weights) - {
    Kind.STORE
}
"""The steps that bring parameters to where compute, or the next step, needs them."""

REDUCING = frozenset(
    kind for kind in Kind if kind.flow in (Flow.GRADIENTS_BETWEEN, Flow.GRADIENTS_WITHIN)
)
"""The collectives of gradients."""
