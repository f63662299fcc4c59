"""Train on a simulated cluster and report the bytes that crossed this node's card; started by torchrun.

    wire_worker.py FOLDER full|lora|strategies

Place 0 of each node writes the `tx_bytes` of every step to FOLDER/<mode>-<node>.json.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile

WIDTH, LAYERS = 768, 8  # 9.4 M parameters, 37.8 MB
RANK = 32
STEPS, BATCHES = 4, 3
STRATEGIES = (
    ("zero3", 1),
    ("zero3+ring", 1),
    ("zero++", 1),
    ("mics", 1),
    ("paro-iig", 1),
    ("fcdp", 8),
    ("fcdp+w8+g4", 1),
    ("fcdp+matrix", 1),
    ("zero3+offload", 1),
)
"""The compared strategies, with the number of micro-batches; Muon steps whole matrices."""


class Layers(nn.Module):
    """Square layers: many bytes with little arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(LAYERS // 2))
        self.backs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(LAYERS // 2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, back in zip(self.layers, self.backs, strict=True):
            x = x + back(torch.relu(layer(x)))
        return x


def _sent() -> int:
    """The bytes that this node has sent so far, read between two barriers so that nothing is in flight."""
    dist.barrier()
    card = os.environ["CLUSTER_IFNAME"]
    sent = int(Path(f"/sys/class/net/{card}/statistics/tx_bytes").read_text())
    dist.barrier()
    return sent


def _steps_of(strategy: str, micro_batches: int, mesh: DeviceMesh) -> list[int]:
    """The bytes that this node sends in each of some optimizer steps after the first."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = fcdp_compile.shard(Layers(), mesh, strategy=strategy)
    net = torch.compile(model, backend="fcdp")
    matrices = [p for p in model.parameters() if p.ndim == 2 and strategy.endswith("+matrix")]
    muon = [fcdp_compile.Muon(matrices, lr=1e-4)] if matrices else []
    rest = [p for p in model.parameters() if p.ndim != 2 or not matrices]
    optimizer = fcdp_compile.combine(*muon, torch.optim.SGD(rest, lr=1e-4))
    generator = torch.Generator().manual_seed(dist.get_rank())
    marks = []
    for _ in range(3):
        for i in range(micro_batches):
            with fcdp_compile.no_sync(net) if i < micro_batches - 1 else nullcontext():
                net(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.append(_sent())
    return [b - a for a, b in itertools.pairwise(marks)]


def _write(folder: Path, mode: str, mesh: DeviceMesh, report: dict[str, Any]) -> None:
    if mesh.get_local_rank("intra") == 0:
        path = folder / f"{mode}-{mesh.get_local_rank('inter')}.json"
        path.write_text(json.dumps(report), encoding="utf-8")
    dist.destroy_process_group()


def main(folder: Path, mode: str) -> None:
    mesh = fcdp_compile.make_mesh()
    assert mesh is not None
    if mode == "strategies":
        found = {name: _steps_of(name, count, mesh) for name, count in STRATEGIES}
        shapes = {n: list(p.shape) for n, p in Layers().named_parameters()}
        _write(folder, mode, mesh, {"shapes": shapes, "steps": found})
        return
    torch.manual_seed(0)
    model: nn.Module = Layers()
    if mode == "lora":
        names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        config = peft.LoraConfig(r=RANK, target_modules=names, init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    parameters = list(model.parameters())
    trainable_bytes = sum(p.nbytes for p in parameters if p.requires_grad)
    all_bytes = sum(p.nbytes for p in parameters)
    model = fcdp_compile.shard(model, mesh, strategy="fcdp")
    net = torch.compile(model, backend="fcdp")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    marks = [_sent()]
    for _ in range(STEPS):
        net(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.append(_sent())
    for _ in range(BATCHES):
        with torch.no_grad():
            net(torch.randn(4, WIDTH, generator=generator))
        marks.append(_sent())
    sent = [b - a for a, b in itertools.pairwise(marks)]
    report = {
        "all_bytes": all_bytes,
        "trainable_bytes": trainable_bytes,
        "steps": sent[:STEPS],
        "evaluation": sent[STEPS:],
    }
    _write(folder, mode, mesh, report)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
