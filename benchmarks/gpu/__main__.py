"""Measure fcdp on one CUDA GPU in ten minutes: `python -m benchmarks.gpu`, or `make gpu`.

Every part runs in processes of its own and leaves a JSON file; the page is written again after each part.
`--device cpu --quick` tries the benchmark out, and `--device sim --quick` does so on the simulated device of
the tests, whose streams are real; neither gives findings.  At the end all files are packed into one to send.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.driver import run_parts
from benchmarks.gpu.parts import PARTS, GpuPart
from benchmarks.gpu.report import faults, write_page
from benchmarks.gpu.results import Outcome, read_outcome
from benchmarks.running.machine import MachineRecord

_ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 570.0  # with this process's start and end, ten minutes
_ASK = """
import numpy, torch  # torch's collectives of objects need numpy
found = torch.cuda.get_device_properties(0)
print(torch.cuda.device_count())
print(f"{found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
"""
_TRIALS = ("cpu", "sim")
_TRIAL_CARDS = 4
"""Each rank of a trial counts as a card, so that the part for several cards is tried out too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the page; returns 1 if any part failed, ran out of time or found a fault."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--device", choices=("cuda", *_TRIALS), default="cuda")
    parser.add_argument("--quick", action="store_true", help="the smallest form of every part")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART")
    parser.add_argument(
        "--out", type=Path, help="folder (default docs; for a trial or --quick build/gpu-trial)"
    )
    args = parser.parse_args(argv)
    is_simulated = args.device in _TRIALS
    out = args.out or _ROOT / ("build/gpu-trial" if is_simulated or args.quick else "docs")
    try:
        cards, device = (_TRIAL_CARDS, args.device) if is_simulated else _found()
    except LookupError as why:
        print(
            f"benchmarks.gpu: no CUDA device can be used ({why}); try it out with --device cpu --quick",
            file=sys.stderr,
        )
        return 1
    chosen = [part for part in PARTS if part.name in args.parts]
    folder = out / "benchmarks" / "gpu"
    earlier = _earlier(folder, chosen, device)
    outcomes: list[Outcome] = []

    def ended(outcome: Outcome) -> None:
        outcomes.append(outcome)
        line = f"{outcome.part}: {outcome.state.value} in {outcome.elapsed_s} s {outcome.reason}"
        print("\n    ".join([line.rstrip(), *faults(outcome)]), file=sys.stderr, flush=True)
        write_page(out / "gpu.md", sorted([*earlier, *outcomes], key=lambda o: names.index(o.part)))

    def command(part: GpuPart, file: Path, seconds: float, is_plain: bool) -> list[str]:
        found = [sys.executable, "-m", "benchmarks.gpu.worker", part.name, "--device", args.device]
        found += ["--out", str(file), "--seconds", str(seconds)]
        return found + ["--quick"] * args.quick + ["--plain"] * is_plain

    run_parts(
        chosen,
        command=command,
        folder=folder,
        budget_s=args.seconds,
        device=device,
        cards=cards,
        ended=ended,
    )
    bundle = _pack(out)
    print(f"wrote {out / 'gpu.md'}; {bundle} has all there is to send", file=sys.stderr)
    return 1 if any(faults(outcome) for outcome in outcomes) else 0


def _earlier(folder: Path, chosen: Sequence[GpuPart], device: str) -> list[Outcome]:
    """The outcomes of other parts on this device and machine, of any commit, which the page keeps."""
    here, kept = MachineRecord.here(), []
    for file in [folder / f"{part.name}.json" for part in PARTS if part not in chosen]:
        if not file.exists():
            continue
        try:
            found = read_outcome(file)
        except (KeyError, TypeError, ValueError) as error:
            print(f"{file} is of another version and left out: {error!r}", file=sys.stderr)
            continue
        if found.device == device and replace(found.machine, commit=here.commit) == here:
            kept.append(found)
    return kept


def _pack(out: Path) -> Path:
    """Pack the page, the findings, the logs and the traces into one file."""
    bundle = _ROOT / "build" / "gpu.tar.gz"
    bundle.parent.mkdir(exist_ok=True)
    with tarfile.open(bundle, "w:gz") as packed:
        for name in ("gpu.md", "benchmarks/gpu"):
            packed.add(out / name, arcname=f"gpu/{name}")
    return bundle


def _found() -> tuple[int, str]:
    """The number of GPUs, and the first one's name and versions; another process asks, so this one uses none.

    Raises: LookupError with the reason if no GPU can be used.
    """
    asked = subprocess.run(
        [sys.executable, "-c", _ASK], capture_output=True, text=True, check=False
    )
    if asked.returncode != 0:
        raise LookupError((asked.stderr.strip().splitlines() or ["its process died"])[-1])
    cards, name = asked.stdout.strip().splitlines()[-2:]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "of an unknown version"
    return int(cards), f"{name}, driver {driver}"


if __name__ == "__main__":
    sys.exit(main())
