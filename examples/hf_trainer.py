"""Fine-tune with transformers.Trainer on FCDP: an ordinary Trainer script with one line changed.

    torchrun --standalone --nproc-per-node=4 examples/hf_trainer.py --nodes 2 --steps 4
    python examples/hf_trainer.py --steps 4

Nothing is downloaded: the model is a small Llama with random weights, or one from a folder (--model); the
text comes with Python and torch. --output gets the trained model and checkpoints; --resume continues from the
last checkpoint, also on other numbers of nodes and processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

from corpus import BYTE_VOCABULARY, MIB, Encoder, Windows, base_text, encode_bytes
from fcdp_compile.integrations.transformers import FcdpOptions, Trainer


class TokenWindows(Dataset[dict[str, torch.Tensor]]):
    """A dataset of token windows for the Trainer."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    """Train, evaluate and save."""
    args = parse_arguments()
    # Accelerate finds GPUs by itself, but must be told to use CPUs.
    use_cpu = not torch.cuda.is_available()
    model, encode, tokenizer = (
        load(args.model) if args.model else (small_llama(), encode_bytes, None)
    )
    text = base_text(seed=0, limit_bytes=MIB)
    tokens = Windows.cut(text, encode, length=args.seq_len).tokens
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.output),
            max_steps=args.steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=args.lr,
            lr_scheduler_type="cosine",
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=max(1, args.steps // 2),
            save_strategy="steps",
            save_steps=max(1, args.steps // 2),
            save_total_limit=2,
            report_to=[],
            use_cpu=use_cpu,
            dataloader_pin_memory=not use_cpu,
        ),
        train_dataset=TokenWindows(tokens[:-16]),
        eval_dataset=TokenWindows(tokens[-16:]),
        processing_class=tokenizer,
        fcdp=FcdpOptions(nodes=args.nodes, strategy=args.strategy),  # by default: torchrun's nodes
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model()  # for from_pretrained; every process calls it
    if dist.is_initialized():
        dist.barrier()  # keep the group until all processes are done
        dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Fine-tune with transformers.Trainer on FCDP.")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=64, help="tokens (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="(%(default)s)")
    parser.add_argument("--nodes", type=int, help="nodes to split one machine's processes into")
    parser.add_argument("--strategy", default="fcdp", help="(%(default)s)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="checkpoint to fine-tune")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        default=Path("hf_trainer_output"),
        help="(%(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser.parse_args()


def small_llama() -> nn.Module:
    """Build a Llama with random weights, the same in every process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTE_VOCABULARY,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.05,  # 0.02 is for wide models; a narrow one then learns slowly
        )
    )


def load(folder: Path) -> tuple[nn.Module, Encoder, Any]:
    """Load a checkpoint and its tokenizer from a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)

    def encode(parts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(parts, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return ids

    return model, encode, tokenizer


if __name__ == "__main__":
    main()
