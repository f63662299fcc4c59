"""The forward saves shards for the backward, never values computed from gathered parameters alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule, Node
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from builders_graph import Where, calls, make_spec, make_specs
from fcdp_compile.core.params import registry
from fcdp_compile.core.params.home_shard import HomeShard
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.ops import REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.partition import check_saved, partition
from fcdp_compile.torch_compat import aot_autograd, min_cut_rematerialization_partition
from fcdp_compile.torch_compat.graphs import is_opaque

ALONE = Where(nodes=1, ranks_per_node=1)
Function = Callable[..., Tensor]


class Owner:
    """Owns parameters on one rank, where a gather is a copy."""

    def __init__(self, specs: dict[str, ParamSpec]) -> None:
        self.specs = specs
        for key in specs:
            registry.register(key, self)

    def spec(self, key: str) -> ParamSpec:
        return self.specs[key]

    def gather_eagerly(self, key: str, shard: Tensor) -> Tensor:
        return shard.clone()

    def reduce_eagerly(self, key: str, grad: Tensor) -> Tensor:
        return grad.clone()

    def accumulates_eagerly(self, key: str) -> bool:
        return False

    def accumulate_eagerly(self, key: str, grad: Tensor) -> Tensor:
        raise AssertionError("nothing accumulates")


def unshard(parameter: Tensor, name: str) -> Tensor:
    return UNSHARD(parameter, f"m0:{name}")


@dataclass(slots=True, kw_only=True)
class Split:
    """The two graphs of one compilation, and where the user's outputs end."""

    fw: GraphModule
    bw: GraphModule
    num_fwd_outputs: int

    @property
    def saved(self) -> list[Node]:
        (outputs,) = self.fw.graph.output_node().args
        return list(outputs)[self.num_fwd_outputs :]

    @property
    def inputs(self) -> list[Node]:
        return self.bw.graph.find_nodes(op="placeholder")[: len(self.saved)]


def compiled(
    function: Function, *args: Any, dynamic: bool = False
) -> tuple[Split, list[Tensor], list[Tensor]]:
    """Compile by AOTAutograd with our partition; returns graphs, and gradients with and without it."""
    splits: list[Split] = []

    def spy(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        fw, bw = partition(
            joint,
            inputs,
            num_fwd_outputs=num_fwd_outputs,
            partitioner=min_cut_rematerialization_partition,
            **options,
        )
        splits.append(Split(fw=fw, bw=bw, num_fwd_outputs=num_fwd_outputs))
        return fw, bw

    backend = aot_autograd(
        fw_compiler=lambda gm, _: gm.forward,
        bw_compiler=lambda gm, _: gm.forward,
        partition_fn=spy,
    )
    torch._dynamo.reset()
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    results = []
    for run in (
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic),
        function,
    ):
        torch.manual_seed(0)
        run(*args).square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    (split,) = splits
    return split, *results


def made_of_parameters(graph: torch.fx.Graph) -> set[Node]:
    """Find by definition the nodes that depend on unshards and on no other varying input."""
    varying: dict[Node, bool] = {}
    gathered: set[Node] = set()
    for n in graph.nodes:
        if n.op == "placeholder":
            varying[n] = True
        elif n.target is UNSHARD:
            varying[n] = False
            gathered.add(n)
        else:
            drawn = (getattr(op, "tags", ()) for op in (n.target, *n.args))  # ops may run ops
            random = any(torch.Tag.nondeterministic_seeded in tags for tags in drawn)
            varying[n] = random or any(varying[i] for i in n.all_input_nodes)
            if not varying[n] and any(i in gathered for i in n.all_input_nodes):
                gathered.add(n)
    return gathered


def check(split: Split) -> None:
    """The invariant holds, and the backward takes exactly the saved values."""
    check_saved(split.fw, split.num_fwd_outputs)
    made = made_of_parameters(split.fw.graph)
    assert made
    assert not made & set(split.saved)
    saved = split.saved
    symbols = [n for n in saved if not isinstance(n.meta["val"], Tensor) and not is_opaque(n)]
    opaque = [n for n in saved if is_opaque(n)]
    tensors = [n for n in saved if n not in symbols and n not in opaque]
    assert saved == [*tensors, *opaque, *symbols]

    def kinds(nodes: list[Node]) -> list[object]:
        return [
            tuple(n.meta["val"].shape) if isinstance(n.meta["val"], Tensor) else type(n.meta["val"])
            for n in nodes
        ]

    assert kinds(split.inputs) == kinds([*symbols, *tensors, *opaque])
    for gm in (split.fw, split.bw):
        gm.graph.lint()
    for node in split.bw.graph.find_nodes(op="placeholder"):
        assert node.next.op == "placeholder" or all(
            later.op != "placeholder" for later in _after(node)
        )


def _after(node: Node) -> Iterator[Node]:
    while (node := node.next).op != "root":
        yield node


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def own(**parameters: Tensor) -> Owner:
    return Owner(make_specs({n: tuple(p.shape) for n, p in parameters.items()}, ALONE))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_linear_saves_its_shard(checkpointed: bool) -> None:
    w, x = parameter(4, 3), torch.randn(5, 3, requires_grad=True)
    owner = own(w=w)

    def function(x: Tensor, w: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return torch.tanh(x @ unshard(w, "w").t())

        return checkpoint(inner, x, use_reentrant=False) if checkpointed else inner(x)

    split, got, expected = compiled(function, x, w)
    check(split)
    torch.testing.assert_close(got, expected)
    assert len(calls(split.fw, UNSHARD)) == len(calls(split.bw, UNSHARD)) == 1
    assert len(calls(split.bw, REDUCE_GRAD)) == 1
    assert w.shape in [n.meta["val"].shape for n in split.saved]
    assert owner.specs


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda w: w.t().contiguous(),
        lambda w: w.bfloat16().float().t(),
        lambda w: (w * 2 + torch.ones(4, 3)).t(),
        lambda w: w.chunk(2)[0].repeat(2, 1).t(),
        lambda w: torch.softmax(w, 1).t(),
    ],
    ids=["copy", "cast", "constant", "split", "softmax"],
)
def test_functions_of_parameters_alone_are_computed_again(
    wrap: Callable[[Tensor], Tensor], checkpointed: bool
) -> None:
    w, x = parameter(4, 3), torch.randn(5, 3, requires_grad=True)
    owner = own(w=w)

    def function(x: Tensor, w: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return torch.tanh(x @ wrap(unshard(w, "w")))

        return checkpoint(inner, x, use_reentrant=False) if checkpointed else inner(x)

    split, got, expected = compiled(function, x, w)
    check(split)
    torch.testing.assert_close(got, expected)
    assert owner.specs


def test_a_merged_adapter_saves_neither_the_sum_nor_the_product() -> None:
    w, a, b = parameter(6, 5), parameter(2, 5), parameter(6, 2)
    w.requires_grad_(False)
    owner = own(w=w, a=a, b=b)
    x = torch.randn(3, 5, requires_grad=True)

    def function(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        merged = unshard(w, "w") + unshard(b, "b") @ unshard(a, "a")
        return torch.tanh(x @ merged.t())

    split, got, expected = compiled(function, x, w, a, b)
    check(split)
    torch.testing.assert_close(got, expected)
    assert (6, 5) in [tuple(n.meta["val"].shape) for n in split.saved]  # w's shard, an input
    assert {str(n.args[1]) for n in calls(split.bw, UNSHARD)} == {"m0:w", "m0:a", "m0:b"}
    assert {str(n.args[1]) for n in calls(split.bw, REDUCE_GRAD)} == {"m0:a", "m0:b"}
    assert owner.specs


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_tied_weight_is_reduced_once(checkpointed: bool) -> None:
    w, v = parameter(7, 4), parameter(4, 4)
    tokens = torch.tensor([1, 3, 6])
    owner = own(w=w, v=v)

    def function(w: Tensor, v: Tensor) -> Tensor:
        hidden = nn.functional.embedding(tokens, unshard(w, "w"))

        def inner(hidden: Tensor) -> Tensor:
            return torch.tanh(hidden @ unshard(v, "v").t())

        hidden = checkpoint(inner, hidden, use_reentrant=False) if checkpointed else inner(hidden)
        return hidden @ unshard(w, "w").t()

    split, got, expected = compiled(function, w, v)
    check(split)
    torch.testing.assert_close(got, expected)
    assert sorted(str(n.args[1]) for n in calls(split.bw, REDUCE_GRAD)) == ["m0:v", "m0:w"]
    assert owner.specs


def test_three_uses_are_reduced_once() -> None:
    w = parameter(4, 4)
    owner = own(w=w)

    def function(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(x @ unshard(w, "w"))
        return x

    split, got, expected = compiled(function, torch.randn(2, 4), w)
    check(split)
    torch.testing.assert_close(got, expected)
    assert len(calls(split.bw, REDUCE_GRAD)) == 1
    assert owner.specs


def test_different_parameters_stay_apart() -> None:
    w, v = parameter(4, 4), parameter(4, 4)
    owner = own(w=w, v=v)

    def function(w: Tensor, v: Tensor) -> Tensor:
        return unshard(w, "w") * unshard(v, "v")

    split, got, expected = compiled(function, w, v)
    check(split)
    torch.testing.assert_close(got, expected)
    assert len(calls(split.bw, REDUCE_GRAD)) == 2
    assert owner.specs


def test_symbols_are_saved_where_they_are_read() -> None:
    w = parameter(4, 3)
    owner = own(w=w)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ unshard(w, "w").t()).reshape(-1) * x.shape[0]

    split, got, expected = compiled(
        function, torch.randn(5, 3, requires_grad=True), w, dynamic=True
    )
    check(split)
    torch.testing.assert_close(got, expected)
    assert any(not isinstance(n.meta["val"], Tensor) for n in split.saved)
    assert owner.specs


MESHES_ARE_INPUTS = torch.__version__ >= (2, 12)
"""Whether graphs take the meshes of DTensors as inputs; torch 2.11 keeps both out of graphs."""


class TestMeshes:
    """DTensor parameters: each mesh is an opaque input, and RNG states must not come behind it."""

    @pytest.fixture(autouse=True)
    def group(self) -> Iterator[None]:
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
        yield
        torch._dynamo.reset()
        dist.destroy_process_group()

    def shards(self, **shapes: tuple[int, ...]) -> tuple[Owner, list[Tensor]]:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("intra", "inter"))
        specs = {n: make_spec(n, s, ALONE) for n, s in shapes.items()}
        homes = [
            HomeShard.of(torch.randn(s.layout.shape), s, mesh, requires_grad=True)
            for s in specs.values()
        ]
        return Owner({s.key: s for s in specs.values()}), homes

    @pytest.mark.parametrize("checkpointed", [False, True])
    @pytest.mark.parametrize("random", ["none", "dropout", "attention"])
    def test_order(self, random: str, checkpointed: bool) -> None:
        owner, (w, v) = self.shards(w=(4, 4), v=(4, 4))

        def function(x: Tensor, w: Any, v: Any) -> Tensor:
            def inner(x: Tensor, parameter: Any, name: str) -> Tensor:
                y = x @ unshard(parameter.to_local(), name).t()
                if random == "dropout":
                    return nn.functional.dropout(torch.tanh(y), 0.5)
                if random == "attention":
                    return scaled_dot_product_attention(y, y, x, dropout_p=0.2)
                return torch.tanh(y)

            for home, name in ((w, "w"), (v, "v")):
                args = (x, home, name)
                x = checkpoint(inner, *args, use_reentrant=False) if checkpointed else inner(*args)
            return x

        x = torch.randn(1, 2, 5, 4, requires_grad=True)
        split, got, expected = compiled(function, x, w, v)
        check(split)
        has_mesh = any(is_opaque(n) for n in split.fw.graph.find_nodes(op="placeholder"))
        assert has_mesh == MESHES_ARE_INPUTS
        assert len(calls(split.fw, UNSHARD)) == len(calls(split.bw, UNSHARD)) == 2
        assert len(calls(split.bw, REDUCE_GRAD)) == 2
        if random == "none":  # graphs draw random numbers in another order than eager code
            for mine, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, theirs)
        assert owner.specs

    def test_random_numbers_of_a_checkpointed_weight_are_drawn_once(self) -> None:
        _, (w,) = self.shards(w=(4, 4))

        def function(x: Tensor, w: Any) -> Tensor:
            def inner(x: Tensor, w: Any) -> Tensor:
                return torch.tanh(x @ nn.functional.dropout(unshard(w.to_local(), "w"), 0.5))

            return checkpoint(inner, x, w, use_reentrant=False)

        split, got, expected = compiled(function, torch.randn(5, 4), w)
        check(split)
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
        for gm in (split.fw, split.bw):
            undescribed = [
                n for n in gm.graph.nodes if n.op == "call_function" and "val" not in n.meta
            ]
            assert all(u.target is operator.getitem for n in undescribed for u in n.users)
