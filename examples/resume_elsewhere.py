"""Train on 2 nodes of 2 ranks, save, resume on 4 nodes of 1 and on one process, and compare the losses.

    2 x 2  ──steps 1 … n──▶ save ──▶ steps n+1 … 2n          the undisturbed run
                              ├────▶ load on 4 x 1 ─▶ steps n+1 … 2n
                              └────▶ load on 1 x 1 ─▶ steps n+1 … 2n

    python examples/resume_elsewhere.py

The script starts torchrun itself, once for each layout, prints the losses side by side, and exits with 1 if
the losses of a resumed run differ from those of the undisturbed run.  A step takes the same batch on every
layout; only the order of sums differs, so losses agree to rounding and not to the bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

import fcdp_compile
from arguments import OneLineParser, UserError, positive, refuse
from corpus import BYTE_VOCABULARY, MIB, CorpusError, Windows, base_text, encode_bytes
from measure import Place, local_device

LAYOUTS = ((2, 2), (4, 1), (1, 1))
"""Nodes and ranks of each layout: first the undisturbed run, then the runs that resume."""

GLOBAL_BATCH = 8
SEQ_LEN = 32
TOLERANCE = 1e-4
"""Relative; another order of sums changes a loss by about 1e-6 in fp32."""


class ByteModel(nn.Module):
    """Predicts the next byte from the last few, with a small residual network."""

    def __init__(self, width: int = 64, context: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTE_VOCABULARY, width)
        self.mix = nn.Conv1d(width, width, context)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, BYTE_VOCABULARY)
        self.context = context

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the bytes that have enough bytes before them.

        tokens: int64 [batch, length].
        """
        x = self.mix(self.embed(tokens).transpose(1, 2)).transpose(1, 2)[:, :-1]
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, self.context :].flatten()
        )


def main() -> int:
    """Run one layout if --layout is given, else run all of them."""
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=positive, default=10, help="steps before the save (%(default)s)"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder for the checkpoint (default: temporary)"
    )
    parser.add_argument(
        "--layout", type=int, help="run only the layout with this number; set by the script itself"
    )
    try:
        args = parser.parse_args()
        if args.layout is not None:
            run_layout(args.layout, args.steps, args.folder)
            return 0
        if args.folder is not None:
            return run_all(args.steps, args.folder)
        with tempfile.TemporaryDirectory() as folder:
            return run_all(args.steps, Path(folder))
    except (UserError, CorpusError, fcdp_compile.CheckpointError) as error:
        refuse(str(error))


def run_all(steps: int, folder: Path) -> int:
    """Run each layout in its own processes, then compare their reports."""
    for number, (nodes, ranks) in enumerate(LAYOUTS):
        print(
            f"{nodes} x {ranks}: {'train and save' if not number else 'load and continue'}",
            flush=True,
        )
        launch = [sys.executable]
        if nodes * ranks > 1:
            launch += ["-m", "torch.distributed.run", "--standalone"]
            launch += [f"--nproc-per-node={nodes * ranks}"]
        arguments = [__file__, f"--layout={number}", f"--steps={steps}", f"--folder={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if subprocess.run([*launch, *arguments], env=environment, check=False).returncode:
            return 1
    found = [json.loads(_report(folder, n).read_text()) for n in range(len(LAYOUTS))]
    return compare(found, steps)


def run_layout(number: int, steps: int, folder: Path) -> None:
    """Train on one layout: the first one saves after `steps`, the others load its checkpoint."""
    device = local_device()
    mesh = fcdp_compile.make_mesh(nodes=LAYOUTS[number][0])
    place = Place.find(mesh, device)
    windows = Windows.cut(base_text(seed=0, limit_bytes=MIB // 4), encode_bytes, length=SEQ_LEN)

    with torch.device("meta"):
        model = ByteModel()
    fcdp_compile.shard(model, mesh)
    if number == 0:
        torch.manual_seed(0)
        fcdp_compile.materialize(model)
    compiled = torch.compile(model, backend="fcdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = 0
    if number:
        # The checkpoint has every parameter, so none needs initialising.
        loaded = fcdp_compile.load(folder / "checkpoint", model=model, optimizer=optimizer)
        first = loaded.step

    losses: dict[int, float] = {}
    for step in range(first, 2 * steps):
        # The whole batch of a step is equal on all layouts, and each rank takes its part of it.
        size = GLOBAL_BATCH // place.world_size
        batch = windows.batch(
            step, size=size, rank=place.rank, world_size=place.world_size, seed=0
        ).to(device)
        loss = compiled(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = place.average(loss.item())
        if number == 0 and step + 1 == steps:
            fcdp_compile.save(folder / "checkpoint", model=model, optimizer=optimizer, step=steps)
    if place.rank == 0:
        _report(folder, number).write_text(json.dumps(losses))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def compare(found: list[dict[str, float]], steps: int) -> int:
    """Print the losses after the save side by side; return 1 if two layouts differ."""
    after = [str(step) for step in range(steps + 1, 2 * steps + 1)]
    headers = ["step", *(f"{n} x {g}" for n, g in LAYOUTS)]
    print(tabulate([[s, *(run[s] for run in found)] for s in after], headers, floatfmt=".6f"))
    undisturbed = found[0]
    off = max(abs(run[s] - undisturbed[s]) / undisturbed[s] for run in found[1:] for s in after)
    print(f"largest difference to the undisturbed run: {off:.1e} of the loss")
    if not off <= TOLERANCE:
        print(f"that is more than {TOLERANCE:.0e}: the resumed losses differ", file=sys.stderr)
        return 1
    print(f"the resumed losses agree on {', '.join(headers[2:])}")
    return 0


def _report(folder: Path, number: int) -> Path:
    return folder / f"losses-{number}.json"


if __name__ == "__main__":
    sys.exit(main())
