"""One rank of the job that loses nodes: LoRA on a Llama in a folder, which notes times and losses."""

from __future__ import annotations

import time

BEGUN_S = time.time()

# ruff: noqa: E402 - imports are a part of what a restart takes
import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import fcdp_compile

BATCH = 12
"""Samples of a step, of all ranks."""
_LENGTH = 32


class Notes:
    """Writes lines of JSON to a file of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def add(self, what: str, **more: Any) -> None:
        """Note an event now."""
        line = {"what": what, "at": time.time(), **more}
        self._file.write(json.dumps(line) + "\n")


def main() -> None:
    """Train, from where the job was."""
    parser = argparse.ArgumentParser()
    for name in ("--base", "--notes", "--checkpoint"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--pace", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    notes = Notes(args.notes)
    notes.add("begun", at=BEGUN_S)
    notes.add("imported")
    mesh = fcdp_compile.make_mesh(timeout=40)
    notes.add("grouped", rank=dist.get_rank(), ranks=dist.get_world_size())
    model = _model(args.base)
    fcdp_compile.shard(model, mesh, strategy="fcdp")
    net: Any = torch.compile(model, backend="fcdp", options={"compute": "eager"}, dynamic=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    notes.add("sharded")
    keeping = _InMemory if args.checkpoint is None else _OnDisk
    kept = keeping(model, optimizer, args)
    notes.add("restored", step=kept.step)
    for step in range(kept.step, args.steps):
        loss = net(input_ids=(ids := _rows(step)), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        sent = fcdp_compile.traffic(model).last_step.bytes("inter", "all_gather")
        kept.commit(step + 1)
        notes.add("step", step=step + 1, loss=mean.item() / dist.get_world_size(), sent=sent)
        time.sleep(args.pace)
    kept.close()
    notes.add("ended")
    dist.barrier()
    dist.destroy_process_group()


class _InMemory:
    """Each step is kept in the memory of the nodes."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace
    ) -> None:
        base = partial(_load_base, model, args.base)
        self._keeper = fcdp_compile.survive(model, optimizer, base=base)
        self.step = self._keeper.step

    def commit(self, step: int) -> None:
        self._keeper.commit()

    def close(self) -> None:
        self._keeper.close()


class _OnDisk:
    """Each step is kept on a disk that all nodes share."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace
    ) -> None:
        _load_base(model, args.base)
        self._model, self._optimizer, self._folder = model, optimizer, args.checkpoint
        self.step = 0
        if (args.checkpoint / "checkpoint.json").exists():
            self.step = fcdp_compile.load(args.checkpoint, model, optimizer=optimizer).step or 0
        self._pending = fcdp_compile.PendingSave()

    def commit(self, step: int) -> None:
        self._pending.wait()
        self._pending = fcdp_compile.save(
            self._folder,
            self._model,
            optimizer=self._optimizer,
            step=step,
            frozen=False,
            asynchronous=True,
        )

    def close(self) -> None:
        self._pending.wait()


def _load_base(model: nn.Module, folder: Path) -> None:
    torch.manual_seed(0)
    fcdp_compile.load_pretrained(model, folder)
    fcdp_compile.materialize(model)


def _model(folder: Path) -> nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.config.use_cache = False
    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


def _rows(step: int) -> Tensor:
    """This rank's samples of a step's batch, which does not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(256, (BATCH, _LENGTH), generator=generator)
    return ids.chunk(dist.get_world_size())[dist.get_rank()]


if __name__ == "__main__":
    main()
