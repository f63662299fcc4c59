"""Train a small Llama with FCDP, then fine-tune it with LoRA, and count the bytes between nodes.

    Python's standard library ──full-parameter training──▶ base weights
    C headers, or --data      ──LoRA on q, k, v, o───────▶ adapters
                                └──▶ bytes between nodes per step, against those of ZeRO-3

On one machine as four processes that act as two nodes (CPU or GPU), or as one plain process:

    torchrun --standalone --nproc-per-node=4 examples/lora_finetune.py --nodes 2
    python examples/lora_finetune.py

Nothing is downloaded: the text comes with Python and torch, and --model takes a Hugging Face
checkpoint from a folder.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import fcdp_compile
from arguments import UserError, parse_arguments, refuse, user_mistakes
from causal_lm import (
    check_lengths,
    checkpoint_mistakes,
    encoder_of,
    load_tokenizer,
    lr_factor,
    small_config,
)
from corpus import (
    MIB,
    CorpusError,
    Encoder,
    Windows,
    base_text,
    encode_bytes,
    folder_text,
    lora_text,
)
from measure import Phase, Place, local_device, report

LORA_RANK = 8
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
CORPUS_LIMIT_BYTES = 2 * MIB


def main() -> int:
    """Run the job; for a user's mistake, print one line and exit with code 2."""
    try:
        run(parse_arguments())
    except (UserError, CorpusError) as error:
        refuse(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


def run(args: argparse.Namespace) -> None:
    """Train or load the base model, fine-tune it, report."""
    # peft calls functions that transformers deprecates; a user cannot change that
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Text first, to refuse a folder without text before minutes of training.
    if args.data is None:
        text = lora_text(seed=args.seed, limit_bytes=CORPUS_LIMIT_BYTES)
    else:
        text = folder_text(args.data, seed=args.seed, limit_bytes=CORPUS_LIMIT_BYTES)
    device = local_device()
    with user_mistakes():
        mesh = fcdp_compile.make_mesh(**({} if args.nodes is None else {"nodes": args.nodes}))
    place = Place.find(mesh, device)

    phases: list[Phase] = []
    encode: Encoder
    if args.model is None:
        base, encode = train_base(args, place, phases), encode_bytes
    else:
        base, encode = load_base(args)
    windows = Windows.cut(text, encode, length=args.seq_len)
    phase = fine_tune(base, windows, args, place)
    if phase.losses:  # else a job that was started again had done all of its steps
        phases.append(phase)

    if place.rank == 0 and phases:
        print(report(phases, nodes=place.nodes, strategy=args.strategy), flush=True)
    if dist.is_initialized():
        dist.barrier()  # keep the group until all ranks are done
        dist.destroy_process_group()


def train_base(args: argparse.Namespace, place: Place, phases: list[Phase]) -> nn.Module:
    """Train all parameters of a Llama from scratch; return a fresh, unsharded Llama with its weights."""
    text = base_text(seed=args.seed, limit_bytes=CORPUS_LIMIT_BYTES)
    windows = Windows.cut(text, encode_bytes, length=args.seq_len)
    model = small_llama(args)
    phases.append(
        train("base", model, windows, args, place, steps=args.base_steps, lr=args.base_lr)
    )
    # From the home shards to whole tensors, on every rank.
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    base = small_llama(args)
    base.load_state_dict(weights)
    return base


def small_llama(args: argparse.Namespace) -> LlamaForCausalLM:
    """Build a Llama with random weights, the same on every rank."""
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(small_config(args))


def load_base(args: argparse.Namespace) -> tuple[nn.Module, Encoder]:
    """Load a checkpoint and its tokenizer from a folder."""
    with checkpoint_mistakes(args.model):
        tokenizer = load_tokenizer(args.model)
        model = AutoModelForCausalLM.from_pretrained(
            args.model, local_files_only=True, dtype=torch.float32
        )
    model.config.use_cache = False
    check_lengths(model, tokenizer, args)
    return model, encoder_of(tokenizer)


def fine_tune(base: nn.Module, windows: Windows, args: argparse.Namespace, place: Place) -> Phase:
    """Freeze the base model, add adapters and train the adapters."""
    torch.manual_seed(args.seed)  # the same adapters on every rank
    layers = {name.rpartition(".")[2] for name, _ in base.named_modules()}
    config = LoraConfig(
        r=LORA_RANK,
        lora_alpha=4 * LORA_RANK,
        # For models with other layer names (GPT-2's c_attn), peft knows which layers to adapt.
        target_modules=list(LORA_TARGETS) if layers.issuperset(LORA_TARGETS) else None,
        task_type="CAUSAL_LM",
    )
    try:
        model = get_peft_model(base, config)
    except ValueError as error:
        raise UserError(f"peft cannot adapt this model: {error}") from error
    return train("LoRA", model, windows, args, place, steps=args.steps, lr=args.lr)


def shard_and_compile(name: str, model: nn.Module, args: argparse.Namespace, place: Place) -> Any:
    """Make the two calls that fcdp needs: `shard`, and torch.compile with its backend."""
    model.to(place.device).train()
    with user_mistakes():
        fcdp_compile.shard(model, place.mesh, strategy=args.strategy)
    options = {} if args.compute is None else {"compute": args.compute}
    if args.dump is not None:
        options["dump"] = str(args.dump / name.lower())
    return torch.compile(model, backend="fcdp", options=options)


def survivor(model: nn.Module, optimizer: torch.optim.Optimizer) -> fcdp_compile.Keeper:
    """Go on from what the nodes' memory has, if the job was killed."""
    with user_mistakes():
        return fcdp_compile.survive(model, optimizer)


def train(
    name: str,
    model: nn.Module,
    windows: Windows,
    args: argparse.Namespace,
    place: Place,
    *,
    steps: int,
    lr: float,
) -> Phase:
    """Shard a model (in place), compile it and train its parameters that are not frozen."""
    parameter_bytes = count_bytes(model.parameters())
    trainable_bytes = count_bytes(p for p in model.parameters() if p.requires_grad)
    compiled = shard_and_compile(name, model, args, place)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)

    keeper = survivor(model, optimizer) if args.survive and name == "LoRA" else None
    start = 0 if keeper is None else keeper.step

    losses: list[float] = []
    sent_bytes: list[int] = []
    tokens_per_s = 0.0
    step_tokens = args.batch_size * args.seq_len * place.world_size
    compiled_at_s = 0.0
    how = {"initial": start, "disable": place.rank != 0, "dynamic_ncols": True}
    with tqdm(total=steps, desc=name, **how) as bar:
        for step in range(start, steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * lr_factor(step, steps)
            batch = batch_of(windows, step, args, place)
            loss = compiled(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if keeper is not None:
                keeper.commit()

            sent_bytes.append(fcdp_compile.traffic(model).last_step.bytes(link="inter"))
            losses.append(place.average(loss.item()))
            if step == start:
                compiled_at_s = time.perf_counter()
            else:
                tokens_per_s = (step - start) * step_tokens / (time.perf_counter() - compiled_at_s)
            bar.set_postfix_str(
                f"loss {losses[-1]:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False
            )
            bar.update()
    if keeper is not None:
        keeper.close()
    return Phase(
        name=name,
        losses=losses,
        sent_bytes=place.per_node(sent_bytes),
        parameter_bytes=parameter_bytes,
        trainable_bytes=trainable_bytes,
        tokens_per_s=tokens_per_s,
    )


def batch_of(windows: Windows, step: int, args: argparse.Namespace, place: Place) -> torch.Tensor:
    """This rank's batch of a step, on its device."""
    size, ranks = args.batch_size, place.world_size
    batch = windows.batch(step, size=size, rank=place.rank, world_size=ranks, seed=args.seed)
    return batch.to(place.device)


def count_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of whole parameters; a tied one counts once."""
    return sum(p.numel() * p.element_size() for p in parameters)


if __name__ == "__main__":
    sys.exit(main())
