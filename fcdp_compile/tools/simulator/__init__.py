"""Training steps on simulated clusters: schedules of a plan, without running or communicating anything.

    Schedules ─▶ tasks ─▶ one rank a class of nodes: program ─▶ lanes ─▶ shared links ─▶ SimulatedStep
                                (conditions: stragglers, slow links, jitter)

A discrete-event simulation of five lanes a rank, with the links that ranks and lanes share.  Arithmetic only:
no torch, no process group, no clock.

    simulate         one schedule on one rank, whose times the dump and the page show
    simulate_step    a training step's schedules on N nodes of g ranks
    Conditions       deviations from the cluster's profile
    Collectives      between nodes: as planned, or flat rings
    SimulatedStep    its times; SimulatedNodes: those of nodes in the same state
"""

from fcdp_compile.tools.simulator.conditions import Conditions
from fcdp_compile.tools.simulator.rings import Collectives
from fcdp_compile.tools.simulator.step import SimulatedNodes, SimulatedStep, simulate, simulate_step

__all__ = [
    "Collectives",
    "Conditions",
    "SimulatedNodes",
    "SimulatedStep",
    "simulate",
    "simulate_step",
]
