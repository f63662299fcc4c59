"""Bytes, memory and losses of QLoRA under fcdp, next to the same job replicated on every rank.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.qlora.elements --nodes 2

A base in NF4 with double quantisation, LoRA on the linear layers, SGD, fp32.  Prints a row for each model:
the bytes that all nodes gather from others in the first step, for a 4-bit element, times N / (N - 1); the
bytes of host memory of a node for one; the gathered bytes of a later step, and those of the adapters alone;
the largest relative difference of a loss from the replicated job.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tabulate import tabulate
from torch import Tensor, nn

import fcdp_compile
from benchmarks.qlora.model import quantise_and_adapt
from fcdp_compile.core.sharding.shard import state_of

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "use_cache": False,
}
MODELS = {
    "Llama": transformers.LlamaConfig(**SHAPE),
    "Mistral": transformers.MistralConfig(**SHAPE),
    "Qwen2": transformers.Qwen2Config(**SHAPE),
    "Mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=4),
}
STEPS = 4


def main() -> None:
    """Measure each model and print the table on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    args = parser.parse_args()
    mesh = fcdp_compile.make_mesh(nodes=args.nodes)
    rows = [measure(name, mesh, args.nodes) for name in args.models]
    if dist.get_rank() == 0:
        print(json.dumps(rows) if args.json else tabulate(rows, headers="keys"), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, mesh: Any, nodes: int) -> dict[str, Any]:
    """Train a model replicated and sharded; returns its row."""
    torch.compiler.reset()
    rank, world = dist.get_rank(), dist.get_world_size()
    expected, _ = train(quantise_and_adapt(MODELS[name]), range(world), world)
    model = fcdp_compile.shard(quantise_and_adapt(MODELS[name]), mesh)
    compiled = torch.compile(model, backend="fcdp")
    losses, sent = train(compiled, [rank], world, model)
    means = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(means)
    of_node = torch.tensor([*sent, state_of(model).host_memory.planned_bytes])
    dist.all_reduce(of_node)
    of_node //= nodes
    sizes = dict.fromkeys(("packed", "frozen", "adapters"), 0)
    elements = 0
    for record in state_of(model).records.values():
        spec, layout = record.spec, record.spec.layout
        kind = "adapters" if record.parameter().requires_grad else "frozen"
        kind = "packed" if spec.is_packed else kind
        sizes[kind] += layout.slot_elements * layout.ranks * spec.gather_dtype.itemsize
        if spec.is_packed and len(layout.shape) == 2:
            elements += 2 * layout.shape[0] * layout.row_elements
    others = (nodes - 1) / nodes
    first = of_node[0].item() / others - sizes["frozen"] - sizes["adapters"]
    return {
        "model": name,
        "4-bit elements": elements,
        "sent once [B/element]": round(first / elements, 4),
        "kept on the host [B/element]": round(
            (of_node[-1].item() - sizes["frozen"] - sizes["adapters"]) / elements, 4
        ),
        "later step [B]": of_node[STEPS - 1].item(),
        "adapters (N-1)/N [B]": int(sizes["adapters"] * others),
        "loss, relative": max(
            abs(a / world - b) / b for a, b in zip(means.tolist(), expected, strict=True)
        ),
    }


def train(
    model: Any, parts: Iterable[int], world: int, sharded: nn.Module | None = None
) -> tuple[list[float], list[int]]:
    """Losses of some steps on these parts of each batch, and gathered bytes between nodes by this rank."""
    parts = list(parts)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05)
    losses, sent = [], []
    for step in range(STEPS):
        total = 0.0
        for part in parts:
            draw = torch.Generator().manual_seed(step * world + part)
            ids = torch.randint(SHAPE["vocab_size"], (2, 32), generator=draw)
            loss: Tensor = model(input_ids=ids, labels=ids).loss / len(parts)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if sharded is not None:
            last = fcdp_compile.traffic(sharded).last_step
            sent.append(last.bytes(link="inter", kind="all_gather"))
    return losses, sent


if __name__ == "__main__":
    main()
