"""Fine-tune a 4-bit base with LoRA (QLoRA) under FCDP, and count the bytes between nodes.

    bf16 checkpoint ──each rank quantises its own blocks──▶ NF4 home shards, frozen
                                                            └── LoRA adapters are trained

On one machine as four processes that act as two nodes (CPU or GPU), or as one plain process:

    torchrun --standalone --nproc-per-node=4 examples/qlora.py --nodes 2
    python examples/qlora.py

Needs bitsandbytes (pip install 'fcdp[quant]').  Without --model, a small Llama with random weights is written
to a temporary folder first, so nothing is downloaded.  No rank ever holds the base in bf16.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig
from transformers.quantizers import AutoHfQuantizer

import fcdp_compile
from measure import local_device

QUANTISED = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
ADAPTERS = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def main() -> int:
    """Build on meta, shard, load, compile, train."""
    parser = argparse.ArgumentParser(description="Fine-tune a 4-bit base with LoRA under FCDP.")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a checkpoint in bf16")
    parser.add_argument("--nodes", type=int, help="nodes that the ranks act as")
    parser.add_argument("--steps", type=int, default=40, help="(%(default)s)")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the adapters here")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = local_device()
    with tempfile.TemporaryDirectory() as temporary:
        # Before the ranks meet: afterwards Transformers would write on rank 0 alone.
        folder = args.model or write_small_checkpoint(Path(temporary))
        mesh = fcdp_compile.make_mesh(**({} if args.nodes is None else {"nodes": args.nodes}))
        model = build_on_meta(folder, device)
        fcdp_compile.shard(model, mesh)
        fcdp_compile.load_pretrained(model, folder)  # each rank quantises the blocks that it owns
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    fcdp_compile.materialize(model)  # the adapters, as PEFT initialises them
    compiled = torch.compile(model, backend="fcdp")
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)

    vocabulary = model.config.vocab_size
    for step in range(args.steps):
        ids = count_up(step * world + rank, vocabulary).to(device)
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = fcdp_compile.traffic(model).last_step.bytes(link="inter")
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}, sent {sent:,} bytes to other nodes")
    if args.save is not None:
        model.save_pretrained(args.save)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def build_on_meta(folder: Path, device: torch.device) -> nn.Module:
    """Build the quantised model with adapters, without memory for its values."""
    config = AutoConfig.from_pretrained(folder, use_cache=False)
    quantizer = AutoHfQuantizer.from_config(QUANTISED, pre_quantized=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        quantizer.preprocess_model(model, dtype=torch.bfloat16, device_map={"": str(device)})
        model.requires_grad_(False)
        return get_peft_model(model, ADAPTERS)


def write_small_checkpoint(folder: Path) -> Path:
    """Write a small Llama with random weights; the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def count_up(seed: int, vocabulary: int) -> torch.Tensor:
    """A batch of sequences that count up in steps of one to four: [4, 64]."""
    draw = torch.Generator().manual_seed(seed)
    first, stride = (torch.randint(1, high, (4, 1), generator=draw) for high in (vocabulary, 5))
    return (first + stride * torch.arange(64)) % vocabulary


if __name__ == "__main__":
    sys.exit(main())
