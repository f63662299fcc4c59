"""Train a small model on FCDP, and after each step send a rollout engine only what has changed in bf16.

    torchrun --standalone --nproc-per-node=4 examples/send_changes.py --nodes 2 --steps 4

The engine is a process of its own, which rank 0 starts (receive_changes.py).  After each step it confirms
that it has all of the model's bits in bf16.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

import fcdp_compile
from arguments import OneLineParser, positive, rate
from corpus import MIB, Windows, base_text, encode_bytes
from measure import Place, local_device
from receive_changes import Item, digest, receive
from resume_elsewhere import SEQ_LEN, ByteModel


def main() -> int:
    """Train and send; return 1 if the engine has other bits than the model."""
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=positive, help="(default: torchrun's)")
    parser.add_argument("--steps", type=positive, default=4, help="(%(default)s)")
    parser.add_argument("--lr", type=rate, default=1e-6, help="(%(default)s)")
    args = parser.parse_args()
    device = local_device()
    mesh = fcdp_compile.make_mesh(nodes=args.nodes)
    place = Place.find(mesh, device)
    windows = Windows.cut(base_text(seed=0, limit_bytes=MIB // 4), encode_bytes, length=SEQ_LEN)
    torch.manual_seed(0)
    model = fcdp_compile.shard(ByteModel(), mesh)
    compiled = torch.compile(model, backend="fcdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    engine = start_engine() if place.rank == 0 else None

    same = send(model, engine, 0)
    for step in range(args.steps):
        batch = windows.batch(step, size=4, rank=place.rank, world_size=place.world_size, seed=0)
        compiled(batch.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        same &= send(model, engine, step + 1)
    if engine is not None:
        engine.send(None)
    same = place.all_agree(same)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if same else 1


def start_engine() -> Connection:
    """Start the engine; returns the connection to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=receive, args=(theirs,), daemon=True).start()
    return ours


def send(model: torch.nn.Module, engine: Connection | None, step: int) -> bool:
    """Send the changes to the engine, and return whether it has the model's bits; all ranks call it."""
    stream = fcdp_compile.stream_state(model, dtype=torch.bfloat16, changes=True)
    sent = 0
    for bucket in stream:  # empty where there is no engine
        if engine is not None:
            items = [(name, plain(item)) for name, item in bucket]
            sent += sum(t.nbytes for _, i in items for t in (i if isinstance(i, tuple) else (i,)))
            engine.send(items)
    has = None
    if engine is not None:
        engine.send([])
        has = engine.recv()
        stream.acknowledge()  # only now does the next stream rely on what the engine has

    plain_stream = fcdp_compile.stream_state(model, dtype=torch.bfloat16)
    whole = {name: tensor for bucket in plain_stream for name, tensor in bucket}
    if engine is None:
        return True
    total = sum(tensor.nbytes for tensor in whole.values())
    same = has == digest(whole)
    verdict = "equal" if same else "different"
    print(f"step {step}: {sent:>7} of {total} bytes sent, {verdict} bits", flush=True)
    return same


def plain(item: torch.Tensor | fcdp_compile.TensorChanges) -> Item:
    """Return what a receiver without fcdp can read, on the host."""
    if isinstance(item, torch.Tensor):
        return item.cpu()
    return item.indices.cpu(), item.values.cpu()


if __name__ == "__main__":
    sys.exit(main())
