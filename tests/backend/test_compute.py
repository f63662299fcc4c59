"""Equal segments are compiled once, and different ones never taken for equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor import cpp_builder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from builders_graph import GraphBuilder, aten
from fcdp_compile.backend import compute as compute_module
from fcdp_compile.backend.compute import Compute, inductor_settings
from fcdp_compile.ops import REQUIRE_GRAD
from fcdp_compile.torch_compat import compilers


def scaled(
    shape: tuple[int, ...] = (3,),
    *,
    factor: float = 2.0,
    name: str = "x",
    dtype: torch.dtype = torch.float32,
    twice: bool = False,
) -> GraphModule:
    b = GraphBuilder({})
    y = b.call(aten.mul.Tensor, b.input(name, shape, dtype), factor)
    return b.finish(b.call(aten.neg.default, y), *([y] if twice else []))


def with_constant(value: float, *, elements: int = 3, is_scalar: bool = False) -> GraphModule:
    b = GraphBuilder({})
    x = b.input("x", (elements,))
    gm = b.finish(x)
    gm.register_buffer("constant", torch.full(() if is_scalar else (elements,), value))
    with gm.graph.inserting_before(gm.graph.output_node()):
        constant = gm.graph.get_attr("constant")
        total = gm.graph.call_function(aten.add.Tensor, (x, constant))
    constant.meta["val"] = total.meta["val"] = x.meta["val"]
    gm.graph.output_node().args = ((total,),)
    gm.recompile()
    return gm


def strided() -> GraphModule:
    gm = scaled((4, 3))
    (x,) = gm.graph.find_nodes(op="placeholder")
    x.meta["val"] = x.meta["val"].t().contiguous().t()
    return gm


@pytest.fixture
def compute() -> Compute:
    return Compute("eager")


def test_equal_ones_are_compiled_once(compute: Compute) -> None:
    first = compute.compile(scaled())
    assert compute.compile(scaled()) is first
    assert compute.compile(scaled(name="other_name")) is first
    (y,) = first([torch.ones(3)])
    assert y.tolist() == [-2.0] * 3


@pytest.mark.parametrize(
    "other",
    [
        lambda: scaled((4,)),
        lambda: scaled(factor=3.0),
        lambda: scaled(dtype=torch.float64),
        lambda: scaled(twice=True),
        lambda: scaled((4, 3)),
        lambda: with_constant(1.0),
    ],
    ids=["shape", "number", "dtype", "outputs", "rank", "constant"],
)
def test_different_ones_are_not(compute: Compute, other: Any) -> None:
    assert compute.compile(other()) is not compute.compile(scaled())


def test_strides_are_a_difference(compute: Compute) -> None:
    assert compute.compile(scaled((4, 3))) is not compute.compile(strided())
    assert compute.compile(strided()) is compute.compile(strided())


def test_which_input_is_which_is_a_difference(compute: Compute) -> None:
    def difference(*, swapped: bool) -> GraphModule:
        b = GraphBuilder({})
        x, y = b.input("x", (3,)), b.input("y", (3,))
        return b.finish(b.call(aten.sub.Tensor, *((y, x) if swapped else (x, y))))

    one, two = (compute.compile(difference(swapped=s)) for s in (False, True))
    given = torch.ones(3), torch.zeros(3)
    assert one([*given])[0].tolist() == [1.0] * 3
    assert two([*given])[0].tolist() == [-1.0] * 3


def test_constants_are_compared_by_their_values(compute: Compute) -> None:
    one, two = compute.compile(with_constant(1.0)), compute.compile(with_constant(5.0))
    assert one([torch.zeros(3)])[0].tolist() == [1.0] * 3
    assert two([torch.zeros(3)])[0].tolist() == [5.0] * 3
    assert compute.compile(with_constant(1.0)) is one


def test_constants_are_read_under_the_mode_that_a_backend_is_called_in(compute: Compute) -> None:
    one, same, other = (with_constant(value, is_scalar=True) for value in (1.0, 1.0, 5.0))
    compiled = compute.compile(one)
    with FakeTensorMode():
        assert compute.compile(same) is compiled
        assert compute.compile(other) is not compiled


def test_large_constants_are_never_shared(compute: Compute) -> None:
    large = with_constant(1.0, elements=2000)
    assert compute.compile(large) is not compute.compile(with_constant(1.0, elements=2000))


def test_generators_are_told_apart_by_their_device_alone(compute: Compute) -> None:
    def drawn(shape: tuple[int, ...]) -> GraphModule:
        b = GraphBuilder({})
        x, state = b.input("x", shape), b.input("fwd_rng_state_0", ())
        gm = b.finish(b.call(aten.neg.default, x))
        state.meta["val"] = torch.Generator()  # each layer has its own
        return gm

    first = compute.compile(drawn((3,)))
    assert compute.compile(drawn((3,))) is first
    assert compute.compile(drawn((4,))) is not first


def test_arguments_are_emptied(compute: Compute) -> None:
    args = [torch.ones(3)]
    compute.compile(scaled())(args)
    assert args == []


def test_inductor_compiles_equal_ones_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def fake(gm: GraphModule, inputs: Any, settings: Any) -> Any:
        compiled.append([tuple(i.shape) for i in inputs])
        assert settings == {"max_autotune": True, "triton.cudagraphs": False}
        for node in gm.graph.find_nodes(op="call_function", target=aten.neg.default):
            node.target = aten.abs.default  # Inductor's passes change the graph
        return gm.forward

    monkeypatch.setattr(compilers, "compile_with_inductor", fake)
    compute = Compute("inductor", {"max_autotune": True})
    shared = scaled()  # plans of alike parameters share their segments
    for gm in (shared, shared, scaled(), scaled((4,))):
        compute.compile(gm)
    assert compiled == [[(3,)], [(4,)]]
    assert len(compute.decompositions()) > 1
    assert list(Compute("eager").decompositions()) == [REQUIRE_GRAD]


def test_no_segment_is_recorded_as_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fake(gm: GraphModule, inputs: Any) -> Any:
        seen.append(inductor_config.triton.cudagraphs)
        return gm.forward

    monkeypatch.setattr(compilers, "compile_fx_inner", fake)
    with inductor_config.patch({"triton.cudagraphs": True}):  # as by TORCHINDUCTOR_CUDAGRAPHS=1
        compute = Compute("inductor", inductor_settings("max-autotune-no-cudagraphs"))
        compute.compile(scaled())
        assert inductor_config.triton.cudagraphs, "the user's own graphs are as before"
    assert seen == [False]


def test_no_matrix_product_is_padded_by_what_one_rank_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(
        compilers,
        "inductor_joint_graph_passes",
        lambda joint: seen.append(inductor_config.shape_padding),
    )
    with inductor_config.patch({"shape_padding": True}):
        Compute("inductor").prepare_joint(scaled())
    assert seen == [False]


def test_modes_are_inductors() -> None:
    assert inductor_settings(None) == inductor_settings("default") == {}
    assert inductor_settings("max-autotune-no-cudagraphs")["max_autotune"] is True


@pytest.mark.parametrize(
    ("mode", "instead"),
    [
        ("max-autotune", "use mode='max-autotune-no-cudagraphs'"),
        ("reduce-overhead", "use mode='default'"),
        ("fast", "takes .*max-autotune-no-cudagraphs"),
    ],
)
def test_modes_with_cuda_graphs_and_unknown_ones_are_refused(mode: str, instead: str) -> None:
    with pytest.raises(ValueError, match=instead):
        inductor_settings(mode)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(names: Any) -> str:
        raise cpp_builder.exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "cpp_compiler_search", search)
    compute_module._warn_once.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_falls_back_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        model = nn.Linear(2, 3)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="fcdp", options={"compute": "inductor"})
        x = torch.ones(1, 2)
        torch.testing.assert_close(compiled(x), model(x))
    (record,) = [r for r in caplog.records if "ATen" in r.getMessage()]
    assert record.levelname == "WARNING"
    assert "No working C++ compiler found" in record.getMessage()


def test_with_a_compiler_there_is_nothing_to_fall_back_from() -> None:
    assert Compute.available("inductor", "cpu") == "inductor"
    assert Compute.available("eager", "cuda") == "eager"


TRAIN = """
import json, torch, fcdp_compile
from torch._dynamo.utils import counters
model = fcdp_compile.shard(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()))
net = torch.compile(model, backend="fcdp", options={"compute": "inductor"})
net(torch.ones(2, 3)).sum().backward()
names = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
print(json.dumps([counters["inductor"][n] for n in names]))
"""


@pytest.mark.rare
def test_a_second_process_finds_every_segment_in_inductors_cache(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", TRAIN], env=environment, check=True, capture_output=True
        )
        found.append(json.loads(done.stdout))
    assert found == [[0, 2, 0], [2, 0, 0]]
