"""Peak memory of loading a quantised Llama on every rank: by blocks onto meta, or whole.

    python -m benchmarks.qlora.loading                           each rank quantises the blocks that it owns
    python -m benchmarks.qlora.loading --mode from_pretrained    each rank loads and quantises all

Two kinds of memory, both in MB: anonymous pages that the process gains during the load, as `benchmarks.load`
measures them, and bytes in use by malloc at the peak that are free again after the load ("passing").  The
first also holds pages that malloc keeps for later.  A narrow model is loaded first, so that modules that the
libraries import late do not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from peft import get_peft_model
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.quantizers import AutoHfQuantizer

import fcdp_compile
from benchmarks.launch import on_ranks
from benchmarks.load import Sampling
from benchmarks.qlora.model import adapters
from benchmarks.running.memory import HeapPeak, heap_bytes
from fcdp_compile.core.sharding.shard import state_of

QUANTISED = transformers.BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
MODES = ("load_pretrained", "from_pretrained")


def main() -> int:
    """Write a checkpoint in bf16, load it on the ranks, and print a table; returns the exit code."""
    parser = argparse.ArgumentParser(description="Peak memory of loading a quantised base.")
    parser.add_argument("--mode", choices=MODES, default=MODES[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.worker:
        work(args.worker, args.nodes, args.mode)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "narrow", 1, 64)
        write(folder / "wide", args.layers, args.width)
        again = [f"--nodes={args.nodes}", f"--mode={args.mode}", f"--worker={folder}"]
        ranks = args.nodes * args.ranks_per_node
        if code := on_ranks(ranks, "-m", "benchmarks.qlora.loading", *again):
            return code
        rows = [json.loads(p.read_text()) for p in sorted(folder.glob("row-*.json"))]
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    return 0


def write(folder: Path, layers: int, width: int) -> None:
    """Write a Llama with random weights in bf16."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        use_cache=False,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        folder
    )


def work(folder: Path, nodes: int, mode: str) -> None:
    """One rank: load, with a thread that samples its memory, and write the row."""
    mesh = fcdp_compile.make_mesh(nodes=nodes)
    rank, world = dist.get_rank(), dist.get_world_size()
    load(folder / "narrow", mode, mesh)
    cost = load(folder / "wide", mode, mesh)
    config = transformers.AutoConfig.from_pretrained(folder / "wide")
    sizes = [p.numel() for p in on_meta(config, quantise=False).parameters()]
    mb = 1e6
    row = {
        "rank": rank,
        "model in bf16": 2 * sum(sizes) / mb,
        "largest weight in bf16": 2 * max(sizes) / mb,
        "a rank's rows of it": 2 * max(sizes) / world / mb,
        "kept": cost.kept_bytes / mb,
        "peak of pages": cost.anonymous_bytes / mb,
        "passing": cost.passing_bytes / mb,
    }
    (folder / f"row-{rank}.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCost:
    """The memory of a load on one rank.

    kept_bytes: of the base, after the load.  passing_bytes: of malloc at the peak, less those after the load.
    """

    kept_bytes: int
    anonymous_bytes: int
    passing_bytes: int


def load(folder: Path, mode: str, mesh: DeviceMesh | None) -> LoadCost:
    """Load a checkpoint."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model: Any = None
    if mode == "load_pretrained":
        model = get_peft_model(on_meta(config, quantise=True), adapters())
        fcdp_compile.shard(model, mesh)
    with Sampling() as pages, HeapPeak() as heap:
        if mode == "load_pretrained":
            fcdp_compile.load_pretrained(model, folder)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=QUANTISED, dtype=torch.bfloat16
            )
    gc.collect()
    passing_bytes = heap.bytes - heap_bytes()
    if mode == "load_pretrained":
        records = state_of(model).records.values()
        kept = sum(r.local().nbytes for r in records if not r.parameter().requires_grad)
    else:
        kept = sum(t.nbytes for t in model.state_dict().values())
    return LoadCost(
        kept_bytes=kept, anonymous_bytes=pages.anonymous_bytes, passing_bytes=passing_bytes
    )


def on_meta(config: transformers.PretrainedConfig, *, quantise: bool) -> nn.Module:
    """Build the model without memory for its values."""
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16
        )
        if quantise:
            quantizer = AutoHfQuantizer.from_config(QUANTISED, pre_quantized=False)
            quantizer.preprocess_model(model, dtype=torch.bfloat16, device_map={"": "cpu"})
            model.requires_grad_(False)
    return model


if __name__ == "__main__":
    sys.exit(main())
