"""Several nodes on one machine: torchrun between network namespaces; `python -m benchmarks.cluster --help`.

    node 0: ranks ── card ──┐            ┌── card ── ranks: node 1
                            ├── switch ──┤
    node 2: ranks ── card ──┘            └── card ── ranks: node 3

Each node is a network namespace with one card: a veth pair, whose other end is a port of the switch, a bridge
in a namespace of its own.  So the machine's network does not change, and no packet leaves the machine.  Ranks
of one node talk over the node's loopback; ranks of different nodes must use the cards, whose counters are
therefore the real bytes between nodes.  Needs only the standard library; only the job imports torch.
"""
