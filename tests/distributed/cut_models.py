"""Models that ranks of a node share, cut in all ways, with their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
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
from tests.device.choice import seeded

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


def llama(pairs: int = 2, **more: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": pairs}, **more))


def lora(model: nn.Module | None = None, **more: Any) -> nn.Module:
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **more)
    return peft.get_peft_model(model or llama(), config)  # type: ignore[arg-type,return-value]


def adapted_later(_: Any, mesh: DeviceMesh | None) -> Any:
    torch.manual_seed(0)
    tp = fcdp_compile.tensor_parallel
    return tp(lora(tp(llama(), mesh)), mesh)


def checkpointed() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model


def qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8))


def mixtral() -> nn.Module:
    config = MixtralConfig(**SIZES, num_local_experts=4, experts_implementation="grouped_mm")
    return MixtralForCausalLM(config)


def with_experts(model: Any, mesh: DeviceMesh | None) -> Any:
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


def sequence_parallel(model: Any, mesh: DeviceMesh | None) -> Any:
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


def declared(model: Any, mesh: DeviceMesh | None) -> Any:
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
    "full": (llama, fcdp_compile.tensor_parallel),
    "tied": (lambda: llama(tie_word_embeddings=True), fcdp_compile.tensor_parallel),
    "LoRA": (lora, fcdp_compile.tensor_parallel),
    "LoRA later": (lora, adapted_later),
    "LoRA and a head": (
        lambda: lora(modules_to_save=["lm_head"]),
        fcdp_compile.tensor_parallel,
    ),
    "checkpointing": (checkpointed, fcdp_compile.tensor_parallel),
    "norms of heads": (qwen3, fcdp_compile.tensor_parallel),
    "mixture": (mixtral, fcdp_compile.tensor_parallel),
    "experts": (mixtral, with_experts),
    "sequence parallelism": (Stack, sequence_parallel),
    "declared parts": (Stack, declared),
}


ONE_LENGTH = {"sequence parallelism"}
"""Torch 2.13 cannot trace the DTensors of its own plans with lengths that vary."""


def batch_of(node: int, step: int, length: int = 16) -> dict[str, Tensor]:
    generator = seeded(10 * step + node)
    ids = torch.randint(VOCABULARY, (2, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-5)
