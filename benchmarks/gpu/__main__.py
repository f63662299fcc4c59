"""Measure fcdp on one CUDA GPU in ten minutes: `python -m benchmarks.gpu`, or `make gpu`.

Every part runs in processes of its own and leaves a JSON file; the page is written again after each part.
`--device cpu --quick` tries the benchmark out; numbers from a CPU are no findings.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.driver import run_parts
from benchmarks.gpu.parts import PARTS, GpuPart
from benchmarks.gpu.report import write_page
from benchmarks.gpu.results import Ending, Outcome

_ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 570.0  # with this process's start and end, ten minutes
_ASK = """
import numpy, torch  # torch's collectives of objects need numpy
found = torch.cuda.get_device_properties(0)
print(f"{found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the page; returns 1 if any part failed or ran out of time."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="the smallest form of every part")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART")
    parser.add_argument("--out", type=Path, help="folder (default docs; on a CPU build/gpu-trial)")
    args = parser.parse_args(argv)
    out = args.out or _ROOT / ("docs" if args.device == "cuda" else "build/gpu-trial")
    device, why = _name_of(args.device)
    if device is None:
        print(
            f"benchmarks.gpu: no CUDA device can be used ({why}); try it out with --device cpu --quick",
            file=sys.stderr,
        )
        return 1
    outcomes: list[Outcome] = []

    def ended(outcome: Outcome) -> None:
        outcomes.append(outcome)
        line = f"{outcome.part}: {outcome.state.value} in {outcome.elapsed_s} s {outcome.reason}"
        print(line.rstrip(), file=sys.stderr, flush=True)
        write_page(out / "gpu.md", outcomes)

    def command(part: GpuPart, file: Path, seconds: float) -> list[str]:
        found = [sys.executable, "-m", "benchmarks.gpu.worker", part.name, "--device", args.device]
        found += ["--out", str(file), "--seconds", str(seconds)]
        return [*found, "--quick"] if args.quick else found

    chosen = [part for part in PARTS if part.name in args.parts]
    folder = out / "benchmarks" / "gpu"
    run_parts(
        chosen, command=command, folder=folder, budget_s=args.seconds, device=device, ended=ended
    )
    print(f"wrote {out / 'gpu.md'}", file=sys.stderr)
    bad = (Ending.FAILED, Ending.TIMEOUT)
    return 1 if any(outcome.state in bad for outcome in outcomes) else 0


def _name_of(device: str) -> tuple[str | None, str]:
    """The device's name, or None and why there is none.  Another process asks, so this one uses no GPU."""
    if device == "cpu":
        return "cpu", ""
    asked = subprocess.run(
        [sys.executable, "-c", _ASK], capture_output=True, text=True, check=False
    )
    if asked.returncode != 0:
        return None, (asked.stderr.strip().splitlines() or ["its process died"])[-1]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "of an unknown version"
    return f"{asked.stdout.strip()}, driver {driver}", ""


if __name__ == "__main__":
    sys.exit(main())
