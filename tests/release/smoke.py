"""What a user does first with an installed fcdp: LoRA on a tiny Llama, on 2 x 2 ranks, to a folder and back.

    torchrun --standalone --nproc-per-node=4 smoke.py

`tests.release.check` copies this file out of the repository, so it imports nothing from there.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fcdp_compile

STEPS = 2
OUTPUT = Path("adapter")
KINDS = ("all_gather", "reduce_scatter")
"""Weights and gradients; a few bytes by which ranks agree come on top."""


def llama() -> LlamaForCausalLM:
    """The same small Llama on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def train(model: nn.Module) -> list[float]:
    """Take a few steps, with other tokens on each rank."""
    compiled = torch.compile(model, backend="fcdp")
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(STEPS + 1):
        loss = compiled(input_ids=tokens, labels=tokens).loss
        losses.append(loss.item())
        if len(losses) <= STEPS:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


def main() -> None:
    """Train, count, export, read back."""
    package = Path(fcdp_compile.__file__).resolve()
    assert package.is_relative_to(Path(sys.prefix).resolve()), f"imported from {package}"
    mesh = fcdp_compile.make_mesh(nodes=2)
    model = get_peft_model(llama(), LoraConfig(r=8, task_type="CAUSAL_LM"))
    adapter_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    fcdp_compile.shard(model, mesh)

    losses = train(model)
    assert losses[-1] < losses[0], f"the losses do not fall: {losses}"
    step = fcdp_compile.traffic(model).last_step
    sent_bytes = torch.tensor(sum(step.bytes("inter", kind) for kind in KINDS))
    dist.all_reduce(sent_bytes, group=mesh.get_group("intra"))
    # Of two nodes each sends half of the adapters, and half of their gradients.
    assert sent_bytes.item() == adapter_bytes, f"{sent_bytes} bytes sent, not {adapter_bytes}"

    fcdp_compile.save_pretrained(model, OUTPUT)
    again = PeftModel.from_pretrained(llama(), OUTPUT)
    values = {name: p for name, p in again.named_parameters() if "lora_" in name}
    with fcdp_compile.gathered(model):
        trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
        assert trained.keys() == values.keys() != set()
        assert all(torch.equal(trained[name], values[name]) for name in values)
    if dist.get_rank() == 0:
        print(f"losses {losses}; {adapter_bytes} bytes between nodes in the last step")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
