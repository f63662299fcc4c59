"""Packing, compared with slicing: two all-gathers of home shards, and two reduce-scatters of gradients."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from builders_plan import ranks, shapes
from fcdp_compile.core.params.layout import ParamLayout
from fcdp_compile.core.params.packing import pack_grads, pack_home, unpack_full, unpack_grads
from fcdp_compile.torch_compat import compilers
from tests.passes.lockstep import cut

dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int8])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Parameters of one bucket on N x g ranks."""

    nodes: int
    per_node: int
    full: list[Tensor]
    home_nodes: list[int | None]

    @property
    def layouts(self) -> list[ParamLayout]:
        return [
            ParamLayout.of(w.shape, self.nodes, self.per_node, home)
            for w, home in zip(self.full, self.home_nodes, strict=True)
        ]

    @property
    def homes(self) -> list[list[Tensor]]:
        """The shards of each rank n * g + l."""
        cuts = []
        for w, layout in zip(self.full, self.layouts, strict=True):
            if (home := layout.home_node) is None:
                cuts.append(cut(w, layout.dim, self.nodes, self.per_node))
                continue
            pieces = cut(w, layout.dim, 1, self.per_node)
            none = [p.narrow(layout.dim or 0, 0, 0) for p in pieces]
            cuts.append(none * home + pieces + none * (self.nodes - 1 - home))
        return [list(shards) for shards in zip(*cuts, strict=True)]

    def node_sizes(self) -> list[int]:
        """The elements of a slot of each node."""
        return [sum(x.elements_of(n) for x in self.layouts) for n in range(self.nodes)]

    def ranks_in_chunk_order(self) -> list[int]:
        return [n * self.per_node + p for p in range(self.per_node) for n in range(self.nodes)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nodes, per_node = draw(ranks)
    drawn = draw(st.lists(shapes, min_size=1, max_size=4))
    full = [torch.randint(-50, 50, s).to(draw(dtypes)) for s in drawn]
    full = [w.mT.contiguous().mT if w.ndim > 1 and draw(st.booleans()) else w for w in full]
    homes: list[int | None] = [None] * len(full)
    if all(w.ndim for w in full) and draw(st.booleans()):
        homes = sorted(draw(st.integers(0, nodes - 1)) for _ in full)
    return Case(nodes=nodes, per_node=per_node, full=full, home_nodes=homes)


quick = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(cases(), dtypes)
def test_gathered_slots_are_the_parameters(case: Case, dtype: torch.dtype) -> None:
    slots = [
        pack_home(shards, case.layouts, dtype, rank // case.per_node)
        for rank, shards in enumerate(case.homes)
    ]
    assert [len(s) for s in slots[:: case.per_node]] == case.node_sizes()
    n, g = case.nodes, case.per_node
    node_shards = [torch.cat([slots[node * g + place] for node in range(n)]) for place in range(g)]
    params = unpack_full(torch.cat(node_shards), case.layouts)
    for got, want in zip(params, case.full, strict=True):
        assert got.shape == want.shape
        assert got.dtype == dtype
        assert got.is_contiguous()
        assert torch.equal(got, want.to(dtype))


@quick
@given(cases(), st.sampled_from([torch.float64, torch.float32]))
def test_scattered_slots_are_the_gradients_shards(case: Case, dtype: torch.dtype) -> None:
    buffer = pack_grads(case.full, case.layouts, dtype)
    assert buffer.dtype == dtype
    slots = buffer.split(case.node_sizes() * case.per_node)
    for chunk, rank in enumerate(case.ranks_in_chunk_order()):
        want = case.homes[rank]
        got = unpack_grads(
            slots[chunk],
            case.layouts,
            [tuple(w.shape) for w in want],
            [w.dtype for w in want],
            rank // case.per_node,
        )
        for shard, expected in zip(got, want, strict=True):
            assert shard.dtype == expected.dtype
            assert torch.equal(shard, expected)


@quick
@given(cases())
def test_a_sum_of_packed_gradients_is_the_packed_sum(case: Case) -> None:
    both = [pack_grads(case.full, case.layouts, torch.float64) for _ in range(2)]
    doubled = pack_grads([w.double() * 2 for w in case.full], case.layouts, torch.float64)
    assert torch.equal(both[0] + both[1], doubled)


def test_a_single_run_of_slots_of_one_element_gives_a_contiguous_parameter() -> None:
    # 7 of 16 slots have an element, and behind it each slot has an element of another parameter.
    layouts = [ParamLayout.of((7,), 16, 1), ParamLayout.of((), 16, 1)]

    param, _ = unpack_full(torch.arange(32.0), layouts)

    assert param.is_contiguous()


def test_slots_of_one_element_give_contiguous_parameters() -> None:
    """A view of every other element would contradict the strides that tracing has seen."""
    layouts = [ParamLayout.of(s, 1, 2) for s in [(), (2,)]]
    _, param = unpack_full(torch.arange(4.0), layouts)
    assert param.tolist() == [1.0, 3.0]
    assert param.is_contiguous()


@pytest.mark.parametrize("shape", [(8,), (8, 3), (16, 2, 2)])
def test_one_even_parameter_is_never_copied(shape: tuple[int, ...]) -> None:
    layout = ParamLayout.of(shape, 2, 2)
    assert layout.dim == 0
    assert layout.is_even
    shard = torch.randn(layout.local_shape(0, 0))
    assert pack_home([shard], [layout], shard.dtype, 0).data_ptr() == shard.data_ptr()
    full = torch.randn(layout.slot_elements * 4)
    (param,) = unpack_full(full, [layout])
    assert param.data_ptr() == full.data_ptr()
    grad = torch.randn(shape)
    assert pack_grads([grad], [layout], grad.dtype).data_ptr() == grad.data_ptr()
    slot = torch.randn(layout.slot_elements)
    (shard,) = unpack_grads(slot, [layout], [tuple(shard.shape)], [slot.dtype], 0)
    assert shard.data_ptr() == slot.data_ptr()


def test_padding_is_zero() -> None:
    layout = ParamLayout.of(
        (5,), 2, 2
    )  # in slots of 2: 2 and 1 rows at the first place, 1 and 1 at the second
    shards = cut(torch.ones(5), 0, 2, 2)
    slots = [pack_home([s], [layout], torch.float32, 0).tolist() for s in shards]
    assert slots == [[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    assert pack_grads([torch.ones(5)], [layout], torch.float32).tolist() == [1, 1, 1, 0, 1, 0, 1, 0]


def test_a_scalars_gradient_reaches_every_rank() -> None:
    layout = ParamLayout.of((), 2, 3)
    assert pack_grads([torch.tensor(7.0)], [layout], torch.float32).tolist() == [7.0] * 6


ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_sums_over_a_few_gathered_elements_compile(device: str) -> None:
    """Weights of 7 labels on 4 ranks: unrolled by Inductor for a GPU, the sum would not compile."""
    layouts = [ParamLayout.of(torch.Size(shape), 2, 2, None) for shape in ((8, 3), (7,))]

    def weighted(full: Tensor, x: Tensor) -> tuple[Tensor]:
        return ((x * unpack_full(full, layouts)[1]).sum(-1),)

    elements = sum(x.slot_elements * x.slots for x in layouts)
    values = (torch.randn(elements, device=device), torch.randn(4, 7, device=device))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(v) for v in values]
        gm = make_fx(weighted, compilers.inductor_decompositions())(*fakes)
    (found,) = compilers.compile_with_inductor(gm, fakes, {})(list(values))
    assert torch.allclose(found, weighted(*values)[0], rtol=1e-5, atol=1e-6)
