"""Fine-tune a small model with LoRA where the ranks of a node share sequences (--cp) or parameters (--tp).

    torchrun --standalone --nproc-per-node=4 examples/shared_node.py --nodes 2 --cp 2
    torchrun --standalone --nproc-per-node=4 examples/shared_node.py --nodes 2 --tp 2
    torchrun --standalone --nproc-per-node=4 examples/shared_node.py --nodes 2 --tp 2 --experts
    python examples/shared_node.py

Nothing is downloaded: the model has random weights and learns the bytes of Python's own modules.  Loss and
gradients are those of whole sequences and of the whole model.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

import fcdp_compile
from corpus import BYTE_VOCABULARY, MIB, base_text


def main() -> None:
    """Train, and report the loss, the memory of the plan and the bytes between nodes."""
    parser = argparse.ArgumentParser(description="LoRA where the ranks of a node share work.")
    parser.add_argument("--nodes", type=int, help="nodes (default: torchrun's)")
    parser.add_argument(
        "--cp", type=int, default=1, help="ranks that share a sequence (%(default)s)"
    )
    parser.add_argument(
        "--tp", type=int, default=1, help="ranks that share each parameter (%(default)s)"
    )
    parser.add_argument(
        "--experts", action="store_true", help="a mixture, whose experts the ranks of --tp divide"
    )
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (%(default)s)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    mesh = fcdp_compile.make_mesh(args.nodes, cp=args.cp, tp=args.tp)
    rank = dist.get_rank() if mesh is not None else 0

    torch.manual_seed(0)  # the same weights in every process
    model = get_peft_model(base_model(args.seq_len, has_experts=args.experts), adapters())
    fcdp_compile.tensor_parallel(model, mesh, experts=args.experts)
    fcdp_compile.context_parallel(model, mesh)
    fcdp_compile.shard(model, mesh)
    net = torch.compile(model, backend="fcdp")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)

    # Ranks of one group read the same sequences.
    text = torch.frombuffer(
        bytearray(base_text(seed=0, limit_bytes=MIB).encode()), dtype=torch.uint8
    )
    sharing = args.cp * args.tp
    group, groups = rank // sharing, (mesh.size() if mesh is not None else 1) // sharing
    for step in range(args.steps):
        begin = (step * groups + group) * args.seq_len % (len(text) - args.seq_len)
        ids = text[begin : begin + args.seq_len][None].long()
        part = fcdp_compile.sequence_part({"input_ids": ids, "labels": ids}, mesh)
        loss = net(**part).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / (groups * sharing)
        if mesh is not None:
            dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1}: loss {mean:.4f}", flush=True)
    peak = fcdp_compile.memory(net).predicted_peak_bytes or 0
    sent = fcdp_compile.traffic(net).last_step.bytes("inter")
    if rank == 0:
        print(f"planned peak of a rank: {peak / 2**20:.1f} MiB")
        print(f"sent to other nodes by a rank in the last step: {sent / 1024:.1f} KiB")
    if mesh is not None:
        dist.destroy_process_group()


def base_model(length: int, *, has_experts: bool) -> PreTrainedModel:
    """A small Llama, or a small Mixtral with 8 experts in each layer."""
    sizes: dict[str, Any] = {
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": length,
        "use_cache": False,
    }
    if has_experts:
        return MixtralForCausalLM(MixtralConfig(**sizes, experts_implementation="grouped_mm"))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def adapters() -> LoraConfig:
    """Adapters on the attention."""
    return LoraConfig(
        r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
    )


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
