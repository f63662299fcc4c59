"""Train on a simulated cluster and report the bytes that crossed this node's card; started by torchrun.

    wire_worker.py FOLDER full|lora|strategies|inner

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
from transformers import LlamaConfig, LlamaForCausalLM

import fcdp_compile
from fcdp_compile.core.params.inner_cut import local_part

WIDTH, LAYERS = 768, 8  # 9.4 M parameters, 37.8 MB
RANK = 32
STEPS, BATCHES = 4, 3
STRATEGIES = (
    ("zero3", 1),
    ("zero++", 1),
    ("mics", 1),
    ("paro-iig", 1),
    ("fcdp", 8),
    ("fcdp+w8+g4", 1),
    ("fcdp+matrix", 1),
    ("zero3+offload", 1),
)
"""The compared strategies, with the number of micro-batches; Muon steps whole matrices."""
INNER = ((1, 2), (2, 1), (2, 2))
"""How many ranks of a node share sequences, and how many share parameters; those that fill a node are run."""


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


def _inner(cp: int, tp: int) -> dict[str, Any]:
    """A small Llama whose sequences or parameters the ranks of a node share.

    Returns the shapes of this rank's parts, the bytes that this node sends in each of some steps after the
    first, and the most bytes that the model itself sends within the node in one pass, from this rank.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    mesh = fcdp_compile.make_mesh(cp=cp, tp=tp)
    assert mesh is not None
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=2, use_cache=False)
    model = fcdp_compile.tensor_parallel(LlamaForCausalLM(config), mesh)
    shapes = {n: list(local_part(p).shape) for n, p in model.named_parameters()}
    model = fcdp_compile.shard(fcdp_compile.context_parallel(model, mesh), mesh)
    net = torch.compile(model, backend="fcdp", options={"compute": "eager"})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("inter"))
    marks = []
    for _ in range(3):
        ids = torch.randint(config.vocab_size, (4, 64), generator=generator)
        part = fcdp_compile.sequence_part({"input_ids": ids, "labels": ids}, mesh)
        net(**part).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.append(_sent())
    within = max(p.inner_bytes for p in fcdp_compile.explain(net).passes)
    sent = [b - a for a, b in itertools.pairwise(marks)]
    return {"cp": cp, "tp": tp, "shapes": shapes, "steps": sent, "within": within}


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
    if mode == "inner":
        filling = [(cp, tp) for cp, tp in INNER if cp * tp == mesh.size(1)]
        _write(folder, mode, mesh, {"runs": [_inner(cp, tp) for cp, tp in filling]})
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
