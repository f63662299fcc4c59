"""What fcdp adds when there is nothing to communicate: one rank, against plain `torch.compile(model)`.

    python benchmarks/one_rank.py --steps 20

Both models train in one process, step by step in turn, so that whatever else the machine does slows both.
Reported is the ratio of median step times, and of the fastest steps.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import fcdp_compile


def main() -> None:
    """Measure and print; exit 1 if the ratio of medians is above --limit."""
    arguments = _arguments()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    plain = _model(arguments).to(device)
    sharded = fcdp_compile.shard(copy.deepcopy(plain))
    parameters = sum(p.numel() for p in plain.parameters())
    ids = torch.randint(0, arguments.vocabulary, (arguments.batch, arguments.length), device=device)
    steps = {
        "plain": _stepper(plain, torch.compile(plain), ids),
        "fcdp": _stepper(
            sharded,
            torch.compile(sharded, backend="fcdp", options={"compute": "inductor"}),
            ids,
        ),
    }
    for name, step in steps.items():
        for _ in range(arguments.warmup):
            loss = step()
        print(f"{name}: loss {loss:.6f} after {arguments.warmup} steps", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.steps):
        order = list(steps) if number % 2 else list(reversed(steps))
        for name in order:
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    print(
        f"{parameters / 1e6:.1f} M parameters, {arguments.batch} x {arguments.length} tokens, {device}"
    )
    print(f"{'':8}{'median ms':>12}{'fastest ms':>12}")
    for name, of_it in times.items():
        print(f"{name:8}{1e3 * statistics.median(of_it):>12.2f}{1e3 * min(of_it):>12.2f}")
    ratio = statistics.median(times["fcdp"]) / statistics.median(times["plain"])
    pairs = statistics.median(f / p for f, p in zip(times["fcdp"], times["plain"], strict=True))
    fastest = min(times["fcdp"]) / min(times["plain"])
    print(
        f"ratio of medians {ratio:.4f}, median of ratios {pairs:.4f}, of the fastest {fastest:.4f}"
    )
    if arguments.limit and ratio > arguments.limit:
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="fcdp on one rank against plain torch.compile.")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=20000)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--limit", type=float, default=None, help="largest ratio that is no failure"
    )
    return parser.parse_args()


def _model(arguments: argparse.Namespace) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=arguments.layers,
            n_embd=arguments.width,
            n_head=12,
            vocab_size=arguments.vocabulary,
            n_positions=arguments.length,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )


def _stepper(model: nn.Module, net: Callable[..., Any], ids: Tensor) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        logits: Tensor = net(input_ids=ids).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
