"""Bytes alive while each node runs, against liveness recomputed from scratch."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
import sympy
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from builders_graph import GraphBuilder, Where, aten, lower_toy
from fcdp_compile import ops
from fcdp_compile.passes.graph.work import accessed_bytes_of
from fcdp_compile.passes.memory.curve import Alive, Lifetimes, hints_of, storages
from fcdp_compile.plan import Lane
from fcdp_compile.torch_compat.tensors import storage_id

WHERE = Where()
NONE: frozenset[int] = frozenset()


def timeline(
    gm: GraphModule,
    *,
    elsewhere: frozenset[int],
    device_type: str,
    sizes: dict[sympy.Symbol, int] | None = None,
) -> tuple[Alive, ...]:
    """The bytes alive while each node runs, by default with the traced sizes."""
    lifetimes = Lifetimes(gm, elsewhere=elsewhere, device_type=device_type)
    return lifetimes.alive(hints_of(gm) if sizes is None else sizes)


def of(gm: GraphModule, elsewhere: frozenset[int] = NONE) -> list[tuple[str, int]]:
    alive = timeline(gm, elsewhere=elsewhere, device_type="cpu")
    return [(a.node, a.bytes) for a in alive]


def test_a_value_lives_from_its_node_to_its_last_use() -> None:
    b = GraphBuilder({})
    x, y = b.input("x", (10,)), b.input("y", (100,))
    twice = b.call(aten.mul.Tensor, x, 2.0)
    added = b.call(aten.add.Tensor, twice, x)
    total = b.call(aten.add.Tensor, added, 1.0)
    result = b.call(aten.sum.default, total)
    # Nothing uses y, which is freed at once; x is freed after `added`, and so is `twice`.
    assert of(b.finish(result)) == [
        (twice.name, 80),
        (added.name, 120),
        (total.name, 80),
        (result.name, 44),
    ]
    assert y.users == {}


def test_views_share_their_storage_and_keep_it() -> None:
    b = GraphBuilder({})
    x = b.input("x", (10, 2))
    copy = b.call(aten.clone.default, x)
    view = b.call(aten.view.default, copy, [20])
    part = b.call(aten.slice.Tensor, view, 0, 0, 4)
    result = b.call(aten.neg.default, part)
    assert [n for _, n in of(b.finish(result))] == [160, 80, 80, 96]


def test_results_and_what_lives_elsewhere() -> None:
    b = GraphBuilder({})
    x = b.input("x", (10,))
    first = b.call(aten.neg.default, x)
    second = b.call(aten.neg.default, x)
    gm = b.finish(first, second, None)
    assert [n for _, n in of(gm)] == [80, 120]
    assert [n for _, n in of(gm, frozenset({storage_id(x.meta["val"])}))] == [40, 80]


def test_other_devices_are_not_counted() -> None:
    b = GraphBuilder({})
    x = b.input("x", (10,))
    gm = b.finish(b.call(aten.neg.default, x))
    alive = timeline(gm, elsewhere=NONE, device_type="cuda")
    assert [a.bytes for a in alive] == [0]


def test_several_results_of_one_node() -> None:
    b = GraphBuilder({})
    x = b.input("x", (10,))
    both = b.call(aten.sort.default, x)
    one = b.call(operator.getitem, both, 1)
    assert [n for _, n in of(b.finish(one))] == [40 + 40 + 80, 80]


def test_a_started_gather_holds_its_input_until_its_wait() -> None:
    lowered = lower_toy({"w": (8,)}, WHERE, strategy="zero3").forward()
    alive = {a.step: a for a in timeline(lowered, elsewhere=NONE, device_type="cpu")}
    shard, x, stamps = 8, 4, 32  # this rank has 2 of 8 elements; the forward's result comes later
    assert alive["inter_all_gather"].bytes == shard + x + 16 + stamps
    assert alive["intra_all_gather"].bytes == shard + x + 16 + 32 + stamps
    assert alive["intra_all_gather"].bucket == 0


def test_symbols_count_with_the_values_that_they_were_traced_with_or_others() -> None:
    gm = make_fx(lambda x: [(x * 2.0).sum(0)], tracing_mode="symbolic")(torch.empty(6, 5))

    def of_sizes(sizes: dict[sympy.Symbol, int] | None) -> list[int]:
        alive = timeline(gm, elsewhere=NONE, device_type="cpu", sizes=sizes)
        return [a.bytes for a in alive]

    s, t = hints_of(gm)
    doubled = make_fx(lambda x: torch.cat([x, x]), tracing_mode="symbolic")(torch.empty(6, 5))
    assert sorted(hints_of(doubled).values()) == [5, 6], "12 is no symbol's value"
    assert of_sizes(None) == of_sizes(hints_of(gm)) == [240, 240 - 120 + 20]
    assert of_sizes({s: 3, t: 7}) == [8 * 21, 4 * 21 + 4 * 7]
    assert of_sizes({s: 3})[0] == 0, "what data decide is not known"
    accessed = [accessed_bytes_of(gm.graph, sizes) for sizes in ({}, {s: 3, t: 7})]
    assert accessed == [120 + 20, 4 * 21 + 4 * 7]


# --- from scratch ---------------------------------------------------------------------------------------


def _values(nodes: list[Node]) -> Iterator[Tensor]:
    yield from (v for n in nodes if isinstance(v := n.meta.get("val"), Tensor))


def _waits(node: Node) -> list[Node]:
    return [u for u in node.users if u.target is ops.wait]


def alive_from_scratch(gm: GraphModule, elsewhere: frozenset[int]) -> list[int]:
    """At each position, count every storage that exists and is still needed."""
    nodes = list(gm.graph.nodes)
    sizes = {storage_id(v): v.untyped_storage().nbytes() for v in _values(nodes)}
    held_by = {n: {storage_id(v) for v in _values([n])} for n in nodes}
    found = []
    for i, node in enumerate(nodes):
        if node.op in ("placeholder", "output"):
            continue
        # The lane holds a started step until a wait for it, or for a step that follows it.
        done = {
            step
            for wait in nodes[:i]
            if wait.target is ops.wait
            for step in _before(wait.all_input_nodes[0], nodes)
        }
        total = 0
        for storage, size in sizes.items():

            def has(some: list[Node], storage: int = storage) -> bool:
                return any(storage in held_by[n] for n in some)

            exists = any(has([n, *_waits(n)]) for n in nodes[: i + 1])
            wanted = has([node, *_waits(node)]) or any(
                has(later.all_input_nodes) for later in nodes[i:]
            )
            held = any(
                _lane(started) is not None
                and started not in done
                and has([started, *_waits(started), *started.all_input_nodes])
                for started in nodes[:i]
            )
            if exists and (wanted or held) and storage not in elsewhere:
                total += size
        found.append(total)
    return found


def _lane(node: Node) -> Lane | None:
    """The lane that a node is a task of."""
    kind = ops.kind_of(node)
    return None if kind is None or kind.lane is Lane.COMPUTE else kind.lane


def _before(step: Node, nodes: Sequence[Node]) -> set[Node]:
    """The steps that must be done once a step is: those it read, and earlier steps of its lane."""
    if _lane(step) is None:
        return set()
    earlier = nodes[: nodes.index(step)]
    same = [n for n in earlier if _lane(n) is _lane(step)][-1:]
    return {step}.union(*(_before(n, nodes) for n in (*same, *step.all_input_nodes)))


SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=2).map(tuple), min_size=1, max_size=4).map(
    lambda shapes: {f"w{i}": s for i, s in enumerate(shapes)}
)


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(
    SHAPES,
    st.sampled_from([(2, 2), (2, 1), (1, 2), (3, 2)]),
    st.sampled_from(["zero3", "zero++", "fcdp"]),
    st.sampled_from([1, 64, 1 << 20]),
    st.booleans(),
)
def test_liveness_of_lowered_graphs(
    shapes: dict[str, tuple[int, ...]],
    ranks: tuple[int, int],
    strategy: str,
    bucket_bytes: int,
    shards_elsewhere: bool,
) -> None:
    where = Where(nodes=ranks[0], ranks_per_node=ranks[1])
    options = {"strategy": strategy, "bucket_bytes": bucket_bytes, "frozen": ["w0"]}
    plain = lower_toy(shapes, where, **options)
    segmented = lower_toy(shapes, where, segmented=True, **options)
    for key, gm in plain.graphs.items():
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder" and "shard" in n.name]
        elsewhere = frozenset(storages([n.meta["val"] for n in inputs], "cpu"))
        elsewhere = elsewhere if shards_elsewhere else NONE
        assert [n for _, n in of(gm, elsewhere)] == alive_from_scratch(gm, elsewhere)
        if not shards_elsewhere:
            pieces = timeline(segmented.graphs[key], elsewhere=NONE, device_type="cpu")
            whole = timeline(gm, elsewhere=NONE, device_type="cpu")
            assert max(a.bytes for a in pieces) == max(a.bytes for a in whole), (
                "looks into segments"
            )


def test_a_reduction_of_few_bits_takes_the_parts_of_others_besides() -> None:
    shapes, where = {"w": (64,)}, Where(nodes=2, ranks_per_node=4)

    def during(dtype: torch.dtype) -> dict[str, int]:
        gm = lower_toy(shapes, where, strategy="zero3", reduces=dtype).backward
        counted = [n for _, n in of(gm)]
        steps = [a.step for a in timeline(gm, elsewhere=NONE, device_type="cpu")]
        besides = zip(steps, counted, alive_from_scratch(gm, NONE), strict=True)
        return {step: total - known for step, total, known in besides if total != known}

    assert during(torch.float32) == {}
    # The bytes that a rank sends, and the sum of one part in fp32; until compute waits for the steps.
    first, second = 2 * 64 + 4 * 16, 2 * 16 + 4 * 8
    assert during(torch.bfloat16) == {
        "intra_reduce_scatter": first,
        "inter_reduce_scatter": first + second,
        "wait": first + second,
    }
