"""Train a small GPT in pipeline stages, each of them sharded over its own nodes.

    torchrun --standalone --nproc-per-node=4 examples/pipeline.py --nodes 2
    torchrun --standalone --nproc-per-node=4 examples/pipeline.py --nodes 4 --micro-batches 8

Nothing is downloaded: the model has random weights and learns the bytes of Python's own modules.  A stage's
parameters and gradients cross between nodes once for each optimizer step, however many micro-batches it has.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import fcdp_compile
from corpus import base_text

BYTES, WIDTH, HEADS, LENGTH = 256, 128, 4, 64
SAMPLES = 4  # sequences of a micro-batch


class Embedding(nn.Module):
    """Tokens and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [B, LENGTH] -> [B, LENGTH, WIDTH]."""
        return self.tokens(ids) + self.positions.weight


class Block(nn.Module):
    """A layer of attention and of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden [B, LENGTH, WIDTH] -> the same."""
        heads = self.qkv(self.norm(hidden)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        mixed = scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(gelu(self.up(self.other_norm(hidden))))


def main() -> None:
    """Train, and report the loss and the bytes between nodes."""
    parser = argparse.ArgumentParser(description="A GPT in pipeline stages.")
    parser.add_argument("--nodes", type=int, help="nodes (default: torchrun's)")
    parser.add_argument("--pp", type=int, default=2, help="stages (%(default)s)")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of each stage (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (%(default)s)")
    args = parser.parse_args()
    mesh = fcdp_compile.make_mesh(args.nodes, pp=args.pp)
    if mesh is None or args.pp == 1:
        parser.error(
            "a pipeline needs several stages; start it with torchrun, and with --pp 2 or more"
        )
    index, is_last = mesh.get_local_rank("pp"), mesh.get_local_rank("pp") == args.pp - 1

    torch.manual_seed(index)  # the same weights on all ranks of a stage
    model = fcdp_compile.shard(stage_model(args.layers, index, args.pp), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    net = torch.compile(model, backend="fcdp")
    stage = fcdp_compile.PipelineStage(net, index, args.pp)
    schedule = Schedule1F1B(stage, n_microbatches=args.micro_batches, loss_fn=loss)

    # Ranks at the same place of all stages work on the same sequences.
    ranks = mesh.size(1) * mesh.size(2)
    place = dist.get_rank() % ranks
    text = base_text(seed=0, limit_bytes=2**20).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step * ranks + place)
        starts = torch.randint(
            len(data) - LENGTH, (args.micro_batches * SAMPLES, 1), generator=generator
        )
        ids = data[starts + torch.arange(LENGTH + 1)].to(stage.device)
        inputs = [ids[:, :-1]] if index == 0 else []
        losses: list[Tensor] = []
        more = {"target": ids[:, 1:], "losses": losses} if is_last else {}
        schedule.step(*inputs, **more)
        optimizer.step()
        optimizer.zero_grad()
        if is_last and place == 0:
            print(f"step {step + 1}: loss {torch.stack(losses).mean():.4f}", flush=True)
    report(model, index, is_first=place == 0)
    dist.destroy_process_group()


def stage_model(layers: int, index: int, stages: int) -> nn.Module:
    """The layers of one stage, with the embedding before the first and the head after the last."""
    parts: list[nn.Module] = [Block() for _ in range(layers)]
    if index == 0:
        parts.insert(0, Embedding())
    if index == stages - 1:
        parts += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)]
    return nn.Sequential(*parts)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the tokens of a micro-batch: logits [B, LENGTH, BYTES], targets [B, LENGTH]."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def report(model: nn.Module, index: int, *, is_first: bool) -> None:
    """Print what a rank of each stage sent to other nodes in the last step, one stage after the other."""
    moved = fcdp_compile.traffic(model).last_step
    weights, gradients = moved.bytes("inter", "all_gather"), moved.bytes("inter", "reduce_scatter")
    line = f"stage {index}: {weights / 1024:.1f} KiB of weights, {gradients / 1024:.1f} KiB of gradients"
    lines = [""] * dist.get_world_size()
    dist.all_gather_object(lines, line if is_first else "")
    if dist.get_rank() == 0:
        print("sent to other nodes by a rank in the last step:", *filter(None, lines), sep="\n")


if __name__ == "__main__":
    main()
