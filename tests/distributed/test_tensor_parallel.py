"""Parameters that ranks of a node share ("tp"), and fcdp shards: parity with one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

import fcdp_compile
from builders_planner import make_profile
from fcdp_compile import Strategy
from fcdp_compile.errors import ArgumentError
from fcdp_compile.integrations.accelerate import Accelerator
from fcdp_compile.planner import Job, estimate, trace
from fcdp_compile.sharding.shard import state_of
from tests.distributed.parity import values
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    "attn_implementation": "sdpa",
}
Cut = Callable[[Any, DeviceMesh | None], Any]


def _llama(pairs: int = 2, **more: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": pairs}, **more))


def _lora(**more: Any) -> nn.Module:
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **more)
    return peft.get_peft_model(_llama(), config)  # type: ignore[arg-type,return-value]


def _checkpointed() -> nn.Module:
    model = _llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model


def _qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8))


def _mixtral() -> nn.Module:
    config = MixtralConfig(**SIZES, num_local_experts=4, experts_implementation="grouped_mm")
    return MixtralForCausalLM(config)


def _with_experts(model: Any, mesh: DeviceMesh | None) -> Any:
    return fcdp_compile.tensor_parallel(model, mesh, experts=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Identity()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.last(self.blocks(self.embed(input_ids)))
        return CausalLMOutput(loss=(hidden**2).mean())


def _sequence_parallel(model: Any, mesh: DeviceMesh | None) -> Any:
    """Torch's own plan: between blocks, each rank has a part of the sequence."""
    assert mesh is not None
    part = Shard(1)
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=part),
        "blocks.*.down": RowwiseParallel(output_layouts=part),
        "last": PrepareModuleInput(
            input_layouts=(part,), desired_input_layouts=(Replicate(),), use_local_output=True
        ),
    }
    return parallelize_module(model, mesh["tp"], plan)


class _Entering(torch.autograd.Function):
    """Sums the gradients of a group's ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, "sum", ctx.group), None


class _Leaving(torch.autograd.Function):
    """Sums the values of a group's ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class PlainBlock(Block):
    """Computes with this rank's parts as plain tensors."""

    group = ""

    def forward(self, x: Tensor) -> Tensor:
        inner = _Entering.apply(x, self.group)  # the norm's gradient is a part, too
        hidden = torch.tanh(nn.functional.linear(self.norm(inner), self.up.weight, self.up.bias))
        return x + _Leaving.apply(nn.functional.linear(hidden, self.down.weight), self.group)


def _declared(model: Any, mesh: DeviceMesh | None) -> Any:
    """Megatron's way, with parts that fcdp is told of."""
    assert mesh is not None
    group, place = mesh.get_group("tp"), mesh.get_local_rank("tp")
    for block in model.blocks:
        block.__class__ = PlainBlock
        block.group = group.group_name
        for parameter in block.norm.parameters():
            fcdp_compile.declare_part(parameter, mesh, Replicate(), sum_gradients=True)
        for layer, name, dim in (("up", "weight", 0), ("up", "bias", 0), ("down", "weight", 1)):
            layer = getattr(block, layer)
            whole = getattr(layer, name).detach()
            part = nn.Parameter(whole.chunk(mesh["tp"].size(), dim)[place].clone())
            fcdp_compile.declare_part(part, mesh, Shard(dim))
            setattr(layer, name, part)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Cut]] = {
    "full": (_llama, fcdp_compile.tensor_parallel),
    "tied": (lambda: _llama(tie_word_embeddings=True), fcdp_compile.tensor_parallel),
    "LoRA": (_lora, fcdp_compile.tensor_parallel),
    "LoRA and a head": (
        lambda: _lora(modules_to_save=["lm_head"]),
        fcdp_compile.tensor_parallel,
    ),
    "checkpointing": (_checkpointed, fcdp_compile.tensor_parallel),
    "norms of heads": (_qwen3, fcdp_compile.tensor_parallel),
    "mixture": (_mixtral, fcdp_compile.tensor_parallel),
    "experts": (_mixtral, _with_experts),
    "sequence parallelism": (Stack, _sequence_parallel),
    "declared parts": (Stack, _declared),
}


ONE_LENGTH = {"sequence parallelism"}
"""Torch 2.13 cannot trace the DTensors of its own plans with lengths that vary."""


def _batch(node: int, step: int, length: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + node)
    ids = torch.randint(VOCABULARY, (2, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-5)


def _train(mesh: DeviceMesh, case: str, compute: str | None) -> Iterator[tuple[float, float]]:
    make, cut = CASES[case]
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    whole = fcdp_compile.make_mesh(nodes=2, tp=2)
    model = fcdp_compile.shard(cut(make(), whole), whole)
    net: Any = model
    if compute is not None:
        net = torch.compile(model, backend="fcdp", options={"compute": compute})
    optimizer, other = _optimizer(model), _optimizer(plain)
    assert whole is not None
    node, (nodes, places) = whole.get_local_rank("inter"), whole.shape[:2]
    mine = node * places + whole.get_local_rank("intra")
    for step in range(3):
        batches = [
            _batch(n, step, 16 if case in ONE_LENGTH else 16 + 3 * step + n)
            for n in range(nodes * places)
        ]
        losses = [plain(**batch).loss for batch in batches]
        expected = torch.stack(losses).mean()
        expected.backward()
        loss = net(**batches[mine]).loss
        loss.backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, plain)]
        assert float(norms[0].full_tensor()) == pytest.approx(float(norms[1]), rel=1e-5), case  # type: ignore[attr-defined]
        for o in (optimizer, other):
            o.step()
            o.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        yield float(mean) / dist.get_world_size(), expected.item()
    with torch.no_grad():
        assert torch.allclose(net(**_batch(0, 9)).loss, plain(**_batch(0, 9)).loss, rtol=1e-5), case
    own = values(model)
    for name, value in plain.named_parameters():
        assert own[name].shape == value.shape
        assert torch.allclose(own[name], value, atol=2e-5), (case, name)
    if compute is not None:
        assert not fcdp_compile.explain(net).graph_breaks, case


def _parity(mesh: DeviceMesh, cases: Sequence[str], compute: str | None = "eager") -> None:
    for case in cases:
        torch._dynamo.reset()
        for loss, expected in _train(mesh, case, compute):
            assert loss == pytest.approx(expected, rel=1e-5), case


_FEW = ("LoRA", "norms of heads", "experts", "declared parts")


@pytest.mark.parametrize(
    "cases",
    [_FEW, pytest.param(tuple(CASES.keys() - set(_FEW)), marks=pytest.mark.slow)],
    ids=["few", "rest"],
)
def test_losses_and_parameters_are_those_of_one_process(cases: Sequence[str]) -> None:
    run(_parity, cases, nodes=2, ranks_per_node=2)


def _outside(mesh: DeviceMesh) -> None:
    """Whole values, writes and state dicts are those of the plain model, bit by bit."""
    whole = fcdp_compile.make_mesh(nodes=2, tp=2)
    for make, cut in (CASES["mixture"], CASES["norms of heads"], CASES["declared parts"]):
        torch.manual_seed(0)
        plain = make()
        torch.manual_seed(0)
        model = fcdp_compile.shard(cut(make(), whole), whole)
        names = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(fcdp_compile.full(parameter), names[name]), name
        name, parameter = [(n, p) for n, p in model.named_parameters() if p.ndim > 1][-1]
        for value in (fcdp_compile.full(parameter), names[name]):
            (value**2).sum().backward()
        gradient: Any = parameter.grad
        assert torch.allclose(gradient.full_tensor(), names[name].grad), name  # type: ignore[arg-type]
        with torch.no_grad(), fcdp_compile.gathered(model, writeback=True):
            loss = model(**_batch(0, 0)).loss
            for p in model.parameters():
                p.mul_(0.5)
        with torch.no_grad():
            assert torch.allclose(loss, plain(**_batch(0, 0)).loss, rtol=1e-5)
            for p in plain.parameters():
                p.mul_(0.5)
        assert _equal(model, plain)
        model.load_state_dict({k: v * 2 for k, v in plain.state_dict().items()})
        plain.load_state_dict({k: v * 2 for k, v in plain.state_dict().items()})
        assert _equal(model, plain)


def _equal(model: nn.Module, plain: nn.Module) -> bool:
    pairs: Any = zip(model.parameters(), plain.parameters(), strict=True)
    return all(torch.equal(p.full_tensor(), q) for p, q in pairs)


def _refusals(mesh: DeviceMesh) -> None:
    def refused(match: str, act: Callable[[], object]) -> None:
        with pytest.raises(ArgumentError, match=match):
            act()

    refused(r"tp=3 must be a whole number that divides", lambda: fcdp_compile.make_mesh(2, tp=3))
    refused(
        r"tp=2 must be a whole number that divides the 1 ranks of a node with cp=2 that are left",
        lambda: fcdp_compile.make_mesh(2, cp=2, tp=2),
    )
    whole = fcdp_compile.make_mesh(nodes=2, tp=2)
    assert whole is not None
    assert whole.mesh_dim_names == ("inter", "intra", "tp")
    tp, place = fcdp_compile.tensor_parallel, whole.get_local_rank("tp")
    refused("takes a model of Transformers", lambda: tp(nn.Linear(2, 2), whole))
    refused("2 ranks cannot share 4 query heads and 1 key", lambda: tp(_llama(1), whole))
    refused("cut already; call tensor_parallel once", lambda: tp(tp(_llama(), whole), whole))
    late = peft.get_peft_model(tp(_llama(), whole), peft.LoraConfig(target_modules=["q_proj"]))
    refused("after fcdp_compile.tensor_parallel", lambda: fcdp_compile.shard(late, whole))
    refused("it has no experts", lambda: _with_experts(_llama(), whole))
    refused("is a DTensor already", lambda: fcdp_compile.shard(tp(_llama(), whole), mesh))
    other = parallelize_module(Stack(), mesh["inter"], {"blocks.*.up": ColwiseParallel()})
    refused(r'rank\'s "tp" mesh has ranks', lambda: fcdp_compile.shard(other, whole))
    torch.manual_seed(place)
    refused(r"differs between ranks \[0, 1\]", lambda: fcdp_compile.shard(Stack(), whole))
    dropping = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    with torch.no_grad():
        for parameter in dropping.parameters():
            parameter.zero_()
    refused("have different seeds for dropout", lambda: fcdp_compile.shard(dropping, whole))
    refused(
        "keeps whole matrices on a node",
        lambda: fcdp_compile.shard(tp(_llama(), whole), whole, strategy="fcdp+matrix"),
    )
    refused(
        "takes Shard of a dimension",
        lambda: fcdp_compile.declare_part(nn.Parameter(torch.ones(2)), whole, Shard(1)),
    )
    torch.manual_seed(0)
    model = fcdp_compile.shard(tp(_llama(), whole), whole)
    model.compile(backend="fcdp", options={"compute": "eager"})
    refused(
        r'ranks 0, 1 share parameters \("tp"\) but got different batches',
        lambda: model(**_batch(dist.get_rank(), 0)),
    )


def _bytes(mesh: DeviceMesh) -> tuple[int, int]:
    """What this rank sends to other nodes in an ordinary step, and its part of the parameters."""
    torch.manual_seed(0)
    whole = fcdp_compile.make_mesh(nodes=2, tp=2)
    model = fcdp_compile.shard(fcdp_compile.tensor_parallel(_llama(), whole), whole)
    net = torch.compile(model, backend="fcdp", options={"compute": "eager"})
    optimizer = _optimizer(model)
    assert whole is not None
    for step in range(2):
        net(**_batch(whole.get_local_rank("inter"), step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "intra (model) [B]" in str(fcdp_compile.explain(net))
    parts = sum(math.prod(r.spec.layout.shape) for r in state_of(model).records.values())
    refused = pytest.raises(ArgumentError, match="sharded over a mesh with 'tp'")
    with refused:
        Accelerator(cpu=True).prepare(model)
    return fcdp_compile.traffic(net).last_step.bytes("inter"), 4 * parts


def test_bytes_are_planned() -> None:
    """The parts of a rank cross twice, as weights and as gradients: counted = formula = plan."""

    def build(batch: int, seq: int) -> tuple[nn.Module, Any]:
        ids = torch.zeros(batch, seq, dtype=torch.long)
        return _llama(), {"input_ids": ids, "labels": ids.clone()}

    found = run(_bytes, nodes=2, ranks_per_node=2)
    agreed = found[0][0] - found[0][1]  # a rank has half of the parts, and sends them twice
    assert 0 <= agreed < 1024
    assert [sent - part for sent, part in found] == [agreed] * 4
    job = Job(profile=make_profile(), nodes=2, ranks_per_node=2, batch=2, tp=2)
    planned = estimate(trace(build, seq=16, param_dtype=None, tp=2), Strategy.parse("fcdp"), job)
    assert planned.inter_bytes_per_step == found[0][1] + found[1][1]
    sent_within = [s.inner_bytes for part in planned.parts for s in part.steps]
    activations = 2 * 16 * SIZES["hidden_size"] * 4  # bytes of one rank's batch
    # An all-reduce of 2 ranks sends as much as it reduces: after the embedding, attention and MLP of each
    # layer, and of the gradients that enter these two and the head; the head gathers its logits.
    logits = 2 * 16 * VOCABULARY // 2 * 4
    assert sum(sent_within) >= (1 + 2 * SIZES["num_hidden_layers"]) * activations + logits


def test_values_outside_and_refusals() -> None:
    run(_outside, nodes=2, ranks_per_node=2)
    run(_refusals, nodes=2, ranks_per_node=2)
