"""A small GPT, whole and cut into stages; a pipeline of these stages trains beside the whole model."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from tests.device.choice import seeded

VOCABULARY, WIDTH, HEADS, LENGTH = 61, 24, 2, 8
SAMPLES = 2
"""Sequences of a micro-batch."""


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        # Stand for adapters: they stay trainable if the base is frozen.
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](hidden))
        heads = torch.unflatten(heads, -1, (3 * HEADS, -1)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2)) + self.adapter(hidden)
        return hidden + self.down(nn.functional.gelu(self.up(self.norms[1](hidden))))


class Checkpointed(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self.block, hidden, use_reentrant=False)


def gpt(blocks: int, *, frozen: bool, checkpointed: bool) -> nn.Sequential:
    """The whole model; each of its modules has parameters that train."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [Block() for _ in range(blocks)]
    if checkpointed:
        layers = [Checkpointed(layer) for layer in layers]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    model = nn.Sequential(Embedding(), *layers, head)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "adapter" in name)
    return model


def cut(model: nn.Sequential, stages: int) -> list[nn.Sequential]:
    """Copies of the model's stages with as many blocks each; names of parameters are those of the model."""
    blocks = len(model) - 2
    first = [0, *(1 + i * blocks // stages for i in range(1, stages)), blocks + 2]
    names = [list(dict(model.named_children()))[a:b] for a, b in itertools.pairwise(first)]
    parts = [nn.Sequential() for _ in range(stages)]
    for part, own in zip(parts, names, strict=True):
        for name in own:
            part.add_module(name, copy.deepcopy(model.get_submodule(name)))
    return parts


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One pipeline.

    compute: None for models that are not compiled.  layered: whether layers are compiled one by one.
    """

    schedule: str = "1f1b"
    micro_batches: int = 4
    strategy: str = "fcdp"
    frozen: bool = False
    checkpointed: bool = False
    compute: str | None = "eager"
    layered: bool = False
    given_shapes: bool = False
    scale_grads: bool = True


class Pipeline:
    """The stages of this rank; `models` are sharded, `whole` is the whole model.

    replica, replicas: this rank's place among the ranks of a stage, and how many there are.
    """

    def __init__(self, mesh: DeviceMesh, trial: Trial, **shard_options: Any) -> None:
        torch._dynamo.reset()
        self.mesh, self.trial = mesh, trial
        depth, index = mesh.size(0), mesh.get_local_rank("pp")
        own = 2 if trial.schedule == "interleaved" else 1
        self.whole = gpt(2 * depth, frozen=trial.frozen, checkpointed=trial.checkpointed)
        parts = cut(self.whole, own * depth)
        self.indices = [index + i * depth for i in range(own)]
        self.models = [
            fcdp_compile.shard(parts[i], mesh, strategy=trial.strategy, **shard_options)
            for i in self.indices
        ]
        self.replicas = mesh.size(1) * mesh.size(2)
        self.replica = mesh.get_local_rank("inter") * mesh.size(2) + mesh.get_local_rank("intra")
        self.nets = [self._compiled(m) for m in self.models]
        self.stages = [
            self._stage(n, i, len(parts)) for n, i in zip(self.nets, self.indices, strict=True)
        ]
        self.schedule = self.scheduled(trial.micro_batches)
        trained = [p for m in self.models for p in m.parameters() if p.requires_grad]
        self.optimizer = _adamw(trained)
        self.whole_optimizer = _adamw([p for p in self.whole.parameters() if p.requires_grad])

    def _compiled(self, model: nn.Module) -> Any:
        if self.trial.compute is None:
            return model
        options = {"compute": self.trial.compute, "bucket_mb": 0.01}
        if not self.trial.layered:
            return torch.compile(model, backend="fcdp", options=options)
        for layer in model.modules():
            if isinstance(layer, Block | Embedding):
                layer.compile(backend="fcdp", options=options)
        return model

    def _stage(self, net: nn.Module, index: int, count: int) -> fcdp_compile.PipelineStage:
        shapes = {}
        if self.trial.given_shapes:
            hidden = torch.empty(SAMPLES, LENGTH, WIDTH, requires_grad=True)
            ids, logits = (
                torch.empty(SAMPLES, LENGTH).long(),
                torch.empty(SAMPLES, LENGTH, VOCABULARY),
            )
            shapes = {
                "input_args": hidden if index else ids,
                "output_args": hidden if index < count - 1 else logits,
            }
        return fcdp_compile.PipelineStage(net, index, count, **shapes)

    def scheduled(self, micro_batches: int, kind: Callable[..., Any] | None = None) -> Any:
        """A schedule of these stages."""
        kind = kind or SCHEDULES[self.trial.schedule]
        is_one = kind in (ScheduleGPipe, Schedule1F1B)
        stages: Any = self.stages[0] if is_one else self.stages
        scale = self.trial.scale_grads
        return kind(stages, n_microbatches=micro_batches, loss_fn=loss_of, scale_grads=scale)

    def batch(self, step: int, replica: int, micro_batches: int) -> tuple[Tensor, Tensor]:
        """The ids and targets that the ranks of one place of all stages train on."""
        generator = seeded(100 * step + replica)
        shape = (micro_batches * SAMPLES, LENGTH + 1)
        ids = torch.randint(VOCABULARY, shape, generator=generator)
        return ids[:, :-1], ids[:, 1:]

    def backward(self, step: int, schedule: Any = None, micro_batches: int | None = None) -> float:
        """One step of the schedule; the loss of this rank's micro-batches, on the last stage's ranks."""
        ids, targets = self.batch(step, self.replica, micro_batches or self.trial.micro_batches)
        losses: list[Tensor] = []
        schedule = schedule or self.schedule
        first = (ids,) if self.mesh.get_local_rank("pp") == 0 else ()
        last = self.mesh.get_local_rank("pp") == self.mesh.size(0) - 1
        schedule.step(*first, target=targets if last else None, losses=losses if last else None)
        return torch.stack(losses).mean().item() if last else 0.0

    def optimize(self) -> None:
        """Step both optimizers and drop the gradients."""
        for optimizer in (self.optimizer, self.whole_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def whole_backward(self, step: int) -> float:
        """The whole model's backward of all micro-batches of all ranks; the loss of this rank's."""
        mine = 0.0
        for replica in range(self.replicas):
            ids, targets = self.batch(step, replica, self.trial.micro_batches)
            loss = loss_of(self.whole(ids), targets)
            (loss / self.replicas).backward()
            mine = loss.item() if replica == self.replica else mine
        return mine

    def parameters(self) -> dict[str, Tensor]:
        """The whole parameters of this rank's stages, by their names in the whole model."""
        return {
            name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
            for model in self.models
            for name, p in model.named_parameters()
        }

    def between_nodes(self) -> list[dict[str, int]]:
        """Bytes that this rank sent to other nodes in the last step, for each of its models."""
        return [
            {k: n for k, n in state_of(m).counters.last_step.items() if k.startswith("inter") and n}
            for m in self.models
        ]


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # A large eps keeps AdamW from magnifying the rounding of gradients that are zero (`parity`).
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


def pipeline_mesh(pp: int, nodes: int) -> DeviceMesh:
    mesh = fcdp_compile.make_mesh(nodes=nodes, pp=pp)
    assert mesh is not None
    assert mesh.mesh_dim_names == ("pp", "inter", "intra")
    assert mesh.mesh[mesh.get_local_rank("pp")].flatten().tolist().count(dist.get_rank()) == 1
    return mesh
