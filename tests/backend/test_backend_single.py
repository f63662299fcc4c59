"""One process without torch.distributed: a laptop's first try."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.fx import GraphModule

import fcdp_compile
from fcdp_compile.passes.pipeline import PASSES
from fcdp_compile.passes.stamp import stamp
from fcdp_compile.plan import Direction
from fcdp_compile.plan.json import read_plan
from fcdp_compile.plan.recording import read_recordings, timelines
from fcdp_compile.plan.stages import read_stages
from fcdp_compile.torch_compat import compilers
from tests.distributed.layered import Model
from tests.marks import quick


@pytest.fixture(autouse=True)
def alone() -> None:
    assert not dist.is_initialized()
    torch._dynamo.reset()
    torch.manual_seed(0)


class Net(nn.Module):
    """Odd sizes, a tie, a scalar, an empty parameter, one that is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 7)
        self.outer = nn.Linear(7, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 5))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embed(tokens)
        hidden = hidden + self.outer(torch.relu(self.inner(hidden))) * self.scale
        return self.head(hidden), self.scale + self.empty.sum()


def losses(model: Callable, parameters: list, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        tokens = torch.randint(0, 11, (2, 5), generator=generator)
        logits, extra = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + extra**2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("compute", quick(["eager", "inductor"], "eager"))
def test_an_unsharded_model_simply_compiles(compute: str) -> None:
    model, plain = Net(), None
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="fcdp", fullgraph=True, options={"compute": compute})
    expected = losses(plain, list(plain.parameters()))
    torch.testing.assert_close(losses(compiled, list(model.parameters())), expected)


@pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
def test_a_sharded_one_trains_like_the_plain_one(strategy: str) -> None:
    model = Net()
    plain = copy.deepcopy(model)
    fcdp_compile.shard(model, strategy=strategy)
    compiled = torch.compile(model, backend="fcdp", fullgraph=True)
    expected = losses(plain, list(plain.parameters()))
    # Not bitwise: AOTAutograd's backward uses other ops than eager autograd's.
    torch.testing.assert_close(losses(compiled, list(model.parameters())), expected)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_sharded_one_trains_under_inductor() -> None:
    model = Net()
    plain = copy.deepcopy(model)
    fcdp_compile.shard(model)
    compiled = torch.compile(model, backend="fcdp", fullgraph=True, options={"compute": "inductor"})
    expected = losses(plain, list(plain.parameters()))
    torch.testing.assert_close(losses(compiled, list(model.parameters())), expected)


@pytest.mark.parametrize("compute", quick(["eager", "inductor"], "eager"))
def test_a_hook_that_asks_for_a_gradient_breaks_no_graph_and_costs_nothing(
    compute: str, tmp_path: Path
) -> None:
    """The hook of Transformers' enable_input_require_grads, which LoRA with checkpointing adds."""

    def ask(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        output.requires_grad_(True)

    calls, ids = [], torch.ones(1, 5, dtype=torch.int64)
    for is_hooked in (False, True):
        torch.manual_seed(0)
        model = Net()
        model.head = nn.Linear(6, 11, bias=False)
        model.embed.requires_grad_(False)
        plain = copy.deepcopy(model)
        if is_hooked:
            model.embed.register_forward_hook(ask)
        folder = tmp_path / str(is_hooked)
        options = {"compute": compute, "dump": str(folder)}
        model = fcdp_compile.shard(model)
        net = torch.compile(model, backend="fcdp", fullgraph=True, options=options)
        found, expected = (
            losses(run, [p for p in run.parameters() if p.requires_grad]) for run in (net, plain)
        )
        torch.testing.assert_close(found, expected)
        with torch.no_grad():  # where older versions of torch do break at the hook
            evaluated = torch.compile(model, backend="fcdp", options={"compute": compute})
            torch.testing.assert_close(evaluated(ids), plain(ids))
        texts = [p.read_text() for p in sorted(folder.glob("*.txt"))]
        calls.append([re.findall(r"torch\.ops\.[\w.]+", text) for text in texts])
    assert len(calls[0]) > 1
    assert all(calls[0])
    assert calls[0] == calls[1]


def test_more_layers_than_dynamos_limit_share_a_trace() -> None:
    count = torch._dynamo.config.recompile_limit + 2
    torch._dynamo.utils.counters.clear()
    model = Model(count, dropout=0.0)
    plain = copy.deepcopy(model)
    fcdp_compile.shard(model)
    for layer in model.layers:
        layer.compile(backend="fcdp", options={"compute": "eager"})
    ids = torch.arange(10).view(2, 5) % 11
    for net in (model, plain):
        net(ids).square().mean().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    assert not [n for n in fcdp_compile.explain(model).uncovered if n.startswith("layers.")]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("does", ["nothing", "keeps"])
def test_hooks_that_do_more_or_less_than_ask_change_nothing(does: str) -> None:
    """A result that requires a gradient would be another tensor than the module's, and no leaf."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        kept.append(output.requires_grad_())

    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6).requires_grad_(False)
            self.same, self.head = nn.Identity(), nn.Linear(6, 3)

        def forward(self, ids: Tensor) -> Tensor:
            found = self.embed(ids)
            same = self.same(found)
            if does == "nothing":
                same += 1
            return (self.head(same) + self.head(found)).square().mean()

    model = Aliased()
    model.same.register_forward_hook(keep if does == "keeps" else lambda *_: None)
    plain = copy.deepcopy(model)
    net = torch.compile(fcdp_compile.shard(model), backend="fcdp", options={"compute": "eager"})
    ids = torch.arange(10).view(2, 5)
    for run in (net, plain):
        run(ids).backward()
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)
    assert len(kept) == (2 if does == "keeps" else 0)
    if kept:
        torch.testing.assert_close(kept[0].grad, kept[1].grad)


def test_uncompiled_it_does_too() -> None:
    model = Net()
    plain = copy.deepcopy(model)
    fcdp_compile.shard(model)
    expected = losses(plain, list(plain.parameters()))
    assert losses(model, list(model.parameters())) == expected


def test_a_returned_parameter_is_a_copy() -> None:
    """Compiled or not, a write to a model's output must not change the model."""

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.weight, self.weight

    for backend in (None, "fcdp"):
        model = fcdp_compile.shard(Returns())
        run = model if backend is None else torch.compile(model, backend=backend)
        for context in (torch.enable_grad, torch.no_grad):
            with context():
                _, weight = run(torch.ones(4))
            weight.detach().fill_(9)
            assert next(model.parameters()).tolist() == [1.0] * 4, (backend, context)


def test_nothing_moves_and_every_step_is_counted() -> None:
    model = fcdp_compile.shard(Net())
    losses(torch.compile(model, backend="fcdp"), list(model.parameters()), steps=3)
    moved = fcdp_compile.traffic(model)
    assert moved.steps == 3
    assert [row[2] for row in moved.total.rows] == [0] * len(moved.total.rows)
    title = "Sent to others (inter, intra) or copied (d2h, h2d) by rank 0 of 1 alone"
    assert str(moved) == f"{title}: nothing so far"


def test_evaluation_after_training() -> None:
    model = fcdp_compile.shard(Net())
    compiled = torch.compile(model, backend="fcdp", fullgraph=True)
    losses(compiled, list(model.parameters()), steps=1)
    tokens = torch.arange(5)[None]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(compiled(tokens), model(tokens))


def test_the_backend_is_found_by_name() -> None:
    assert "fcdp" in torch.compiler.list_backends(exclude_tags=())


def compile_with(**settings: object) -> Tensor:
    return torch.compile(nn.Linear(2, 2), backend="fcdp", **settings)(torch.ones(1, 2))


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(Exception, match=r"unknown option 'comptue'.*compute, dump, bucket_mb"):
        compile_with(options={"comptue": "eager"})


@pytest.mark.skipif(
    torch.__version__ < (2, 15), reason="torch before 2.15 asks nothing of a backend before a graph"
)
def test_a_backend_is_told_no_options_before_the_first_graph() -> None:
    """So `torch.compile` cannot refuse options; the first graph refuses them."""
    told: list[object] = []

    def backend(gm: GraphModule, inputs: object, **given: object) -> Callable[..., object]:
        told.append(given)
        return gm.forward

    backend._dynamo_backend_init = lambda *given, **more: told.append((given, more))
    compiled = torch.compile(nn.Linear(2, 2), backend=backend, options={"compute": "eager"})
    assert told == [((), {})]
    compiled(torch.ones(1, 2))
    assert told[1:] == [{"options": {"compute": "eager"}}]


def test_modes_reach_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_with(mode="default").shape == (1, 2)
    seen = []

    def spy(gm: object, inputs: object, settings: dict[str, object]) -> object:
        seen.append((settings, inductor_config.max_autotune))
        return real(gm, inputs, settings)

    real = compilers.compile_with_inductor
    monkeypatch.setattr(compilers, "compile_with_inductor", spy)
    torch._dynamo.reset()
    assert compile_with(mode="max-autotune-no-cudagraphs").shape == (1, 2)
    assert seen
    assert all(settings["max_autotune"] and not outside for settings, outside in seen)


def test_modes_with_cuda_graphs_are_refused() -> None:
    with pytest.raises(Exception, match="use mode='max-autotune-no-cudagraphs'"):
        compile_with(mode="max-autotune")


def test_a_dump_that_cannot_be_written_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only rank 0 would stop, and the others would wait for it."""
    (tmp_path / "file").write_text("in the way")
    model = fcdp_compile.shard(nn.Linear(4, 4))
    options = {"dump": tmp_path / "file" / "folder"}
    torch.compile(model, backend="fcdp", options=options)(torch.ones(2, 4)).sum().backward()
    (told,) = [r.getMessage() for r in caplog.records if "cannot write plans" in r.getMessage()]
    assert str(tmp_path) in told


def test_times_that_cannot_be_written_stop_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = fcdp_compile.shard(nn.Linear(4, 4))
    options = {"dump": tmp_path / "folder", "record": 1}
    compiled = torch.compile(model, backend="fcdp", options=options)
    compiled(torch.ones(2, 4)).sum().backward()
    shutil.rmtree(tmp_path / "folder")
    for _ in range(4):
        compiled(torch.ones(2, 4)).sum().backward()
    (told,) = [r.getMessage() for r in caplog.records if "plans and recordings" in r.getMessage()]
    assert str(tmp_path / "folder") in told
    assert not (tmp_path / "folder").exists()


def test_a_script_that_ends_early_leaves_the_times_of_its_runs(tmp_path: Path) -> None:
    """An earlier script's times of a plan are deleted with its plan."""
    (tmp_path / "graph-000.recorded.json").write_text("of an earlier run")
    (tmp_path / "graph-007.recorded.json").write_text("of an earlier run")
    script = """
        import sys, torch, fcdp_compile
        model = fcdp_compile.shard(torch.nn.Linear(3, 3))
        options = {"dump": sys.argv[1], "record": 5}
        compiled = torch.compile(model, backend="fcdp", options=options)
        for _ in range(3):
            compiled(torch.ones(2, 3)).sum().backward()
    """
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), str(tmp_path)],
        check=True,
        timeout=900,
    )
    plan = read_plan(tmp_path / "graph-000.plan.json")
    stages = read_stages(tmp_path / "graph-000.stages.json")
    assert [s.name for s in stages if s.graph in ("joint", "forward", "forward cold")] == [
        one.__name__ for one in PASSES if one is not stamp
    ], "one rank needs no stamps"
    assert all("def forward" in s.text and s.time_s > 0 for s in stages)
    gathered = [c for s in stages for c in s.ops if s.name == "lower" and "unshard" in c.op]
    assert {(c.more, c.less) for c in gathered} == {(0, 2)}, "weight and bias"
    ((name, recordings),) = read_recordings(tmp_path).items()
    assert name == "graph-000"
    assert {r.direction: len(r.runs) for r in recordings} == {
        Direction.FORWARD: 2,
        Direction.BACKWARD: 2,
    }
    assert all(time.total_s > 0 for time in timelines(plan, recordings).values())


def test_torchs_structured_trace_has_plan_and_graphs(tmp_path: Path) -> None:
    """The trace that TORCH_TRACE writes and tlparse shows."""
    script = """
        import torch, fcdp_compile
        model = fcdp_compile.shard(torch.nn.Linear(3, 3))
        torch.compile(model, backend="fcdp")(torch.ones(2, 3)).sum().backward()
    """
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        env={**os.environ, "TORCH_TRACE": str(tmp_path)},
        check=True,
    )
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    for name in ("fcdp_plan_0", "fcdp_graph_0_forward_cold", "fcdp_graph_0_backward_cold"):
        assert f'"name": "{name}"' in text
    assert '"schema": "fcdp.plan/' in text
