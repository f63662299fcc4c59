"""Weights as exact differences: how many bits they take, and what training with them sends and takes.

    python -m benchmarks.bits                           bits of a weight by learning rate, in one process
    python -m benchmarks.cluster --nodes 2 --ranks-per-node 2 --bandwidth 100mbit -- benchmarks/bits.py \\
        --lr 1e-5 --batch 1                             losses, bytes and seconds of strategies, on nodes

A byte-level Llama is trained on Python's own library, and then fine-tuned on the headers of its C API.
Gathers and reductions are in bf16, AdamW keeps fp32.
"""

from __future__ import annotations

import argparse
import copy
import os
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.runtime.collectives.difference import Code, counts

RATES = (1e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 3e-4)
STRATEGIES = ("fcdp", "fcdp+delta", "fcdp+g4", "fcdp+delta+g4")
_BATCH, _LENGTH, _WARMUP = 4, 128, 5


def main() -> None:
    """Measure, and print a table on the first rank."""
    parser = argparse.ArgumentParser(description="Exact differences of weights.")
    add = parser.add_argument
    add("--strategies", nargs="+", default=list(STRATEGIES))
    add("--lr", type=float, default=1e-5, help="of fine-tuning (%(default)s)")
    add("--steps", type=int, default=40, help="of fine-tuning (%(default)s)")
    add("--pretraining", type=int, default=300, help="steps before it (%(default)s)")
    add("--batch", type=int, default=4, help="of fine-tuning on nodes (%(default)s)")
    add("--accumulate", type=int, default=1, help="micro-batches of a step (%(default)s)")
    add("--width", type=int, default=192, help="of the model (%(default)s)")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        print(tabulate(_densities(args), headers=("lr", "changed", "entropy", "bits")))
        return
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    model = _model(args, pretraining=args.pretraining if is_first else 0)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    rows = [_trained(copy.deepcopy(model), strategy, args) for strategy in args.strategies]
    if is_first:
        headers = ("strategy", "last losses", "gather [B]", "reduce [B]", "bits", "s/step")
        print(tabulate(rows, headers=headers, floatfmt=(".0f", ".5f", ".0f", ".0f", ".2f", ".2f")))


def _model(args: argparse.Namespace, *, pretraining: int) -> nn.Module:
    """A model that has learned for so many steps."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - an extra

    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=args.width,
            intermediate_size=args.width * 8 // 3,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        )
    )
    folder = Path(sysconfig.get_paths()["stdlib"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for ids, _ in zip(_batches(folder, "*.py", args.seed), range(pretraining), strict=False):
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _batches(folder: Path, pattern: str, seed: int, size: int = _BATCH) -> Iterator[Tensor]:
    texts = (path.read_bytes() for path in sorted(folder.glob(pattern)))
    text = torch.frombuffer(bytearray(b"".join(texts)[:3_000_000]), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        at = torch.randint(len(text) - _LENGTH, (size,), generator=generator).tolist()
        yield torch.stack([text[i : i + _LENGTH] for i in at])


def _fine(seed: int, size: int = _BATCH) -> Iterator[Tensor]:
    return _batches(Path(sysconfig.get_paths()["include"]), "**/*.h", seed, size)


def _densities(args: argparse.Namespace) -> Iterator[Sequence[object]]:
    model = _model(args, pretraining=args.pretraining)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for rate in RATES:
        model.load_state_dict(state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        for ids, _ in zip(_fine(args.seed), range(args.steps), strict=False):
            old = _flat(model)
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        new = _flat(model)
        moves = new.view(torch.int16).int() - old.view(torch.int16).int()
        _, seen = torch.unique(moves, return_counts=True)
        parts = seen / len(moves)
        code = Code((len(new), *counts(new, old).tolist()))
        bits = min(16.0, 8 * code.bytes / len(new))
        entropy = -(parts * parts.log2()).sum().item()
        yield f"{rate:.0e}", (moves != 0).float().mean().item(), entropy, bits


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().bfloat16().flatten() for p in model.parameters()])


def _trained(model: nn.Module, strategy: str, args: argparse.Namespace) -> Sequence[object]:
    """The strategy, a mean loss at the end, bytes of this rank in the last step, bits, seconds."""
    torch.compiler.reset()
    mesh = fcdp_compile.make_mesh()
    fcdp_compile.shard(model, mesh, strategy=strategy, param_dtype=torch.bfloat16)
    net = torch.compile(model, backend="fcdp", options={"compute": "eager"}, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses, seconds = [], []
    batches = _fine(1000 * args.seed + dist.get_rank(), args.batch)
    last = args.accumulate - 1
    for step in range(args.steps):
        begun = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / _WARMUP)
        for i, ids in zip(range(args.accumulate), batches, strict=False):
            with fcdp_compile.no_sync(model) if i < last else nullcontext():
                loss = net(input_ids=ids, labels=ids).loss / args.accumulate
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() * args.accumulate
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        seconds.append(time.perf_counter() - begun)
    moved = state_of(model).counters.last_step
    weights = sum(p.to_local().numel() for p in model.parameters())
    gathered = moved["inter_all_gather"]
    return (
        strategy,
        sum(losses[-10:]) / len(losses[-10:]),
        gathered,
        moved["inter_reduce_scatter"],
        8 * gathered / weights / (state_of(model).topology.nodes - 1),
        median(seconds[_WARMUP:]),
    )


if __name__ == "__main__":
    main()
