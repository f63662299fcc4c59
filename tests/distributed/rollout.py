"""A stand-in for a rollout engine: a process that loads weights from a socket and compares them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.exports import ADAPTED, ids, llama, make

Bucket = list[tuple[str, Tensor]]


class Engine:
    """A rank's connection to the engine at an address."""

    def __init__(self, address: str) -> None:
        self._connection = Client(address)

    def load(self, kind: str, buckets: Iterator[Bucket], expected: Path) -> tuple[str, Tensor]:
        """Send buckets; returns the engine's verdict on them and the logits that it then computes.

        kind: "all" or "adapters".  expected: a safetensors file with the values that must arrive.
        """
        self._connection.send((kind, expected))
        for bucket in buckets:
            self._connection.send([(name, tensor.cpu().numpy()) for name, tensor in bucket])
            assert self._connection.recv() == len(bucket), "the engine has taken another bucket"
        self._connection.send([])
        verdict, logits = self._connection.recv()
        return verdict, torch.from_numpy(logits)


@contextmanager
def engine(folder: Path) -> Iterator[str]:
    """Run an engine for one rank; gives its address."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    ours, theirs = context.Pipe()
    address = str(folder / "engine")
    process = context.Process(target=_serve, args=(address, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(300), "the engine did not start"
        ours.recv()
        yield address
    finally:
        process.kill()
        process.join(10)


def _serve(address: str, parent: Connection) -> None:
    torch.set_num_threads(1)
    with Listener(address) as listener:
        parent.send("listens")
        with listener.accept() as rank:
            try:
                while True:
                    kind, expected = rank.recv()
                    rank.send(_loaded(rank, load_file(expected), *_models()[kind]))
            except EOFError:
                return


def _models() -> dict[str, tuple[Any, Callable[[Any, dict[str, Tensor]], Any]]]:
    """By kind: a model that has the base's first values, and how it loads some tensors."""
    return {
        "all": (make(llama), lambda model, part: model.load_state_dict(part, strict=False)),
        "adapters": (make(ADAPTED["lora"]), peft.set_peft_model_state_dict),
    }


def _loaded(
    rank: Connection, expected: dict[str, Tensor], model: Any, load: Callable[[Any, Any], Any]
) -> tuple[str, Any]:
    """Load buckets until an empty one, as an engine does: one by one; compare what has arrived."""
    wrong, arrived = [], set()
    while bucket := rank.recv():
        part = {name: torch.from_numpy(array) for name, array in bucket}
        wrong += [
            n for n, t in part.items() if n not in expected or not torch.equal(t, expected[n])
        ]
        arrived |= part.keys()
        load(model, part)
        rank.send(len(bucket))
    wrong += sorted(expected.keys() - arrived)
    with torch.no_grad():
        return f"wrong: {wrong}" if wrong else "equal", model(input_ids=ids()).logits.numpy()
