"""What dpo.py and grpo.py share: words as tokens, a small Llama, and the bytes of several models.

text -> the most frequent words -> tokenizer, passages
trainer.add_callback(BytesOfModels({"policy": …, "reference": …})) -> bytes between nodes, step by step
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import transformers
from tabulate import tabulate
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import LlamaConfig, PreTrainedTokenizerFast, TrainerCallback

import fcdp_compile
from corpus import MIB, base_text
from measure import Place

SPECIAL = ("<pad>", "<eos>", "<unk>")
WORDS = 253  # with the special tokens a vocabulary of 256
KIB = 1 << 10


def parser_of(what: str) -> argparse.ArgumentParser:
    """Declare the arguments of both examples."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="(%(default)s)")
    parser.add_argument("--nodes", type=int, help="nodes to split one machine's processes into")
    parser.add_argument("--strategy", default="fcdp", help="(%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where the policy is saved")
    return parser


def quiet() -> None:
    """Leave out progress bars, and warnings that a user of the examples cannot act on."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def passages(length: int) -> list[list[str]]:
    """Cut the text of Python's standard library into passages, each of `length` frequent words."""
    words = re.findall(r"[a-z]+", base_text(seed=0, limit_bytes=MIB).lower())
    known = {word for word, _ in Counter(words).most_common(WORDS)}
    kept = [word for word in words if word in known]
    return [kept[at : at + length] for at in range(0, len(kept) - length, length)]


def tokenizer_of(texts: list[list[str]]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each word, the most frequent words first."""
    counted = Counter(word for words in texts for word in words)
    words = sorted(counted, key=lambda word: (-counted[word], word))
    vocabulary = {word: at for at, word in enumerate((*SPECIAL, *words))}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def small_config(tokenizer: PreTrainedTokenizerFast, **more: Any) -> LlamaConfig:
    """Describe a Llama of half a MiB for the tokenizer."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.05,  # 0.02 is for wide models; a narrow one then learns slowly
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **more,
    )


class BytesOfModels(TrainerCallback):
    """Counts the bytes that this rank sends to other nodes, for each model and in each step."""

    def __init__(self, models: dict[str, nn.Module]) -> None:
        self.models = models
        self.totals: list[list[int]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note the bytes so far; only optimizer steps make a step, and a reference has none."""
        row: list[int] = []
        for model in self.models.values():
            sent = fcdp_compile.traffic(model).total
            row.append(sent.bytes("inter", "all_gather"))
            row.append(sent.bytes("inter", "reduce_scatter"))
        self.totals.append(row)

    def report(self, place: Place) -> str:
        """Return two tables: bytes between nodes, and host memory; all ranks must call it."""
        if place.nodes == 1:
            return "\nThere is one node, so nothing crossed between nodes.\n"
        before = [[0] * len(self.totals[0]), *self.totals[:-1]]
        rows: list[list[float]] = []
        for step, (old, new) in enumerate(zip(before, self.totals, strict=True), 1):
            sent = place.per_node([b - a for a, b in zip(old, new, strict=True)])
            rows.append([step, *(value / KIB for value in sent)])
        headers = ["step"]
        for name in self.models:
            headers += [f"{name}\nweights", f"{name}\ngradients"]
        # A frozen model has no gradients.
        columns = [0, *(i for i in range(1, len(headers)) if i % 2 or any(r[i] for r in rows))]
        table = tabulate(
            [[row[i] for i in columns] for row in rows],
            headers=[headers[i] for i in columns],
            floatfmt=("", *[".1f"] * (len(columns) - 1)),
        )
        title = f"KiB sent from node to node, per node ({place.nodes} nodes)"
        return f"\n{title}\n\n{table}\n\n{self._host_memory(place)}\n"

    def _host_memory(self, place: Place) -> str:
        stored = []
        for model in self.models.values():
            moved = fcdp_compile.traffic(model)
            again = moved.last_step.bytes("d2h", "store")  # trained weights, anew in each step
            stored.append(moved.total.bytes("d2h", "store") - max(0, moved.steps - 1) * again)
        kib = [value / KIB for value in place.per_node(stored)]
        table = tabulate(
            [*zip(self.models, kib, strict=True), ("all", sum(kib))],
            headers=("model", "KiB"),
            floatfmt=("", ".1f"),
        )
        return f"Host memory of a node that holds gathered weights\n\n{table}"


def finish(trainer: Any, counted: BytesOfModels, output: Path | None) -> None:
    """Save the policy, print the tables and leave; every process calls it."""
    if output is not None:
        trainer.save_model(str(output))  # for from_pretrained; of adapters, only the adapters
    place = Place.find(trainer.accelerator.mesh, torch.device(trainer.args.device))
    report = counted.report(place)
    if place.rank == 0:
        print(report, flush=True)
    if dist.is_initialized():
        dist.barrier()  # keep the group until all processes are done
        dist.destroy_process_group()
