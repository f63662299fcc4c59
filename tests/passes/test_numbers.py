"""Lowered graphs of all ranks, compared with the plain computation, exactly.

Whole numbers in float64 leave nothing to rounding: tangents are multiples of G, so averages are whole too.
"""

from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import Tensor

from builders_graph import Lowered, Shape, Where, lower_toy
from builders_plan import shapes
from fcdp_compile.core.params.layout import choose_dim
from fcdp_compile.plan import Direction, Variant
from tests.passes import lockstep

COLD, WARM = Variant.COLD, Variant.WARM
STRATEGIES = ("zero3", "zero++", "fcdp", "zero3+ho_ring", "fcdp+ho_ring")

quick = settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])


class Cluster:
    """The toy model on every rank of a cluster, and the same model on one."""

    def __init__(
        self, params: dict[str, Shape], nodes: int, per_node: int, *, frozen: list[str], **options
    ) -> None:
        self.nodes, self.per_node = nodes, per_node
        self.frozen = frozen
        self.places = [
            Where(nodes=nodes, ranks_per_node=per_node, node=n, place=p)
            for n, p in product(range(nodes), range(per_node))
        ]
        self.lowered: list[Lowered] = [
            lower_toy(params, w, frozen=frozen, home=torch.float64, **options) for w in self.places
        ]
        self.memories = [lockstep.Rank() for _ in self.places]
        self.set_values({n: _whole_numbers(s) for n, s in params.items()})

    def set_values(self, full: dict[str, Tensor]) -> None:
        self.full = full
        cuts = {
            n: lockstep.cut(
                w, choose_dim(w.shape, self.nodes, self.per_node), self.nodes, self.per_node
            )
            for n, w in full.items()
        }
        self.shards = [[cuts[n][r] for n in full] for r in range(len(self.places))]

    def run(self, direction: Direction, variant: Variant, args: list[list]) -> list[tuple]:
        graphs = [made.graphs[direction, variant] for made in self.lowered]
        return lockstep.run(
            graphs, args, self.memories, nodes=self.nodes, ranks_per_node=self.per_node
        )

    def step(self, variant: Variant) -> None:
        """One forward and backward of every rank, compared with autograd on the whole model."""
        ranks = len(self.places)
        x = [torch.tensor(float(r % 3 - 1), dtype=torch.float64) for r in range(ranks)]
        t = [torch.tensor(float(ranks * (r + 1)), dtype=torch.float64) for r in range(ranks)]
        given = [[*s, x[r]] for r, s in enumerate(self.shards)]
        forward = self.run(Direction.FORWARD, variant, [list(a) for a in given])
        saved = [list(f[1:]) for f in forward]
        backward = self.run(Direction.BACKWARD, COLD, [[*s, t[r]] for r, s in enumerate(saved)])
        params = {n: w.clone().requires_grad_() for n, w in self.full.items()}
        for r in range(ranks):
            xr = x[r].clone().requires_grad_()
            y = xr * sum((w * w).sum() for w in params.values())
            (y * t[r] / ranks).backward()
            assert torch.equal(forward[r][0], y.detach())
            assert torch.equal(backward[r][0], xr.grad * ranks)
        for i, (name, w) in enumerate(params.items()):
            dim = choose_dim(w.shape, self.nodes, self.per_node)
            expected = lockstep.cut(w.grad, dim, self.nodes, self.per_node)
            for r in range(ranks):
                got = backward[r][1 + i]
                if name in self.frozen:
                    assert got is None
                else:
                    assert got.shape == expected[r].shape
                    assert torch.equal(got, expected[r])

    def accumulate(self, micro_batches: int) -> None:
        """Micro-batches, of which only the last synchronises, compared with the sum of their averages."""
        ranks = len(self.places)
        params = {n: w.clone().requires_grad_() for n, w in self.full.items()}
        for i in range(micro_batches):
            is_last = i == micro_batches - 1
            x = [torch.tensor(float((r + i) % 3 - 1), dtype=torch.float64) for r in range(ranks)]
            t = [torch.tensor(float(ranks * (r + i)), dtype=torch.float64) for r in range(ranks)]
            given = [[*s, x[r]] for r, s in enumerate(self.shards)]
            forward = self.run(Direction.FORWARD, COLD, given)
            saved = [[*f[1:], t[r]] for r, f in enumerate(forward)]
            variant = Variant.COLLECT if is_last else Variant.ACCUMULATE
            backward = self.run(Direction.BACKWARD, variant, saved)
            squares = sum((w * w).sum() for w in params.values())
            sum(xr * tr / ranks * squares for xr, tr in zip(x, t, strict=True)).backward()
            if not is_last:
                for shard in (g for b in backward for g in b[1:] if g is not None):
                    assert torch.all((shard == 0) & shard.signbit())
        assert not any(memory.gradients for memory in self.memories)
        for i, (name, w) in enumerate(params.items()):
            dim = choose_dim(w.shape, self.nodes, self.per_node)
            expected = lockstep.cut(w.grad, dim, self.nodes, self.per_node)
            for r in range(ranks):
                got = backward[r][1 + i]
                assert got is None if name in self.frozen else torch.equal(got, expected[r])


def _whole_numbers(shape: Shape) -> Tensor:
    return torch.randint(-4, 5, shape, dtype=torch.float64)


def fill_caches(cluster: Cluster) -> None:
    """Gather every bucket between nodes, as the runtime does before a forward that loads."""
    for r, where in enumerate(cluster.places):
        peers = [p for p, other in enumerate(cluster.places) if other.place == where.place]
        for bucket in cluster.lowered[0].buckets.values():
            slots = []
            for peer in peers:
                shards = dict(zip(cluster.full, cluster.shards[peer], strict=True))
                for p in bucket.params:
                    rows = shards[p.name]
                    if p.layout.dim is not None:
                        rows = rows.movedim(p.layout.dim, 0)
                    missing = p.layout.slot_elements - rows.numel()
                    slots += [rows.reshape(-1), torch.zeros(missing, dtype=torch.float64)]
            cluster.memories[r].cache[bucket.id] = torch.cat(slots)


@quick
@given(
    st.lists(shapes, min_size=1, max_size=4),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(STRATEGIES),
    st.sampled_from([1, 300, 1 << 20]),
    st.booleans(),
    st.sampled_from(["just in time", 1, 300, None]),
    st.data(),
)
def test_every_rank_computes_what_one_would(
    drawn: list[Shape],
    size: tuple[int, int],
    strategy: str,
    bucket_bytes: int,
    segmented: bool,
    budget: int | str | None,
    data: st.DataObject,
) -> None:
    params = {f"p{i}": s for i, s in enumerate(drawn)}
    frozen = sorted(data.draw(st.sets(st.sampled_from(sorted(params)))))
    cluster = Cluster(
        params,
        *size,
        frozen=frozen,
        strategy=strategy,
        bucket_bytes=bucket_bytes,
        segmented=segmented,
        scheduled=budget != "just in time",
        in_flight_bytes=budget if isinstance(budget, int) else None,
        viewed=data.draw(st.booleans()),
    )
    fill_caches(cluster)  # frozen buckets are loaded even by the cold variant
    cluster.step(COLD)
    if strategy.startswith("fcdp") and size[0] > 1:
        cluster.step(WARM)


@quick
@given(
    st.lists(shapes, min_size=1, max_size=4),
    st.tuples(st.integers(1, 3), st.integers(1, 3)).filter(lambda size: size != (1, 1)),
    st.sampled_from(["fcdp", "zero1"]),
    st.integers(1, 3),
    st.sampled_from([1, 300, 1 << 20]),
    st.sampled_from(["just in time", 1, 300, None]),
    st.data(),
)
def test_micro_batches_add_up_to_the_sum_of_their_averages(
    drawn: list[Shape],
    size: tuple[int, int],
    strategy: str,
    micro_batches: int,
    bucket_bytes: int,
    budget: int | str | None,
    data: st.DataObject,
) -> None:
    params = {f"p{i}": s for i, s in enumerate(drawn)}
    assume(size[0] > 1 or strategy == "zero1")  # within one node fcdp reduces every micro-batch
    cluster = Cluster(
        params,
        *size,
        frozen=sorted(data.draw(st.sets(st.sampled_from(sorted(params))))),
        strategy=strategy,
        bucket_bytes=bucket_bytes,
        segmented=data.draw(st.booleans()),
        scheduled=budget != "just in time",
        in_flight_bytes=budget if isinstance(budget, int) else None,
    )
    fill_caches(cluster)
    cluster.accumulate(micro_batches)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_changed_parameter_is_gathered_again(strategy: str) -> None:
    cluster = Cluster({"w": (5, 3), "b": (3,)}, 2, 2, frozen=[], strategy=strategy)
    cluster.step(COLD)
    cluster.set_values({n: w + 1 for n, w in cluster.full.items()})
    cluster.step(COLD)


def test_this_notices_stale_copies() -> None:
    cluster = Cluster({"w": (5, 3)}, 2, 2, frozen=[], strategy="fcdp")
    cluster.step(COLD)
    cluster.set_values({"w": cluster.full["w"] + 1})
    with pytest.raises(AssertionError):
        cluster.step(WARM)


def test_every_rank_does_the_same_steps() -> None:
    cluster = Cluster({"w": (7, 3), "s": (), "b": (1,)}, 2, 3, frozen=["b"], strategy="fcdp")
    fill_caches(cluster)
    cluster.step(COLD)
    first, *others = [m.done for m in cluster.memories]
    assert first
    assert all(done == first for done in others)
