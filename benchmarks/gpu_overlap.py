"""What fcdp costs on one CUDA GPU: python benchmarks/gpu_overlap.py

(a) copies of the pinned pool against cudaMemcpy, (b) a step with host-cached weights against one with all on
the GPU, (c) peak memory against FSDP2's, (d) four ranks over Gloo: losses and traffic, (e) a profiler trace.
`--device cpu --tiny` tries the script out; what it then finds is no finding.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.gpu_parts import Copies, Fsdp2Peak, GpuRun, P, Parity, Steps, read_part
from benchmarks.gpu_report import NOT_MEASURED, write_gpu_report
from benchmarks.machine import Machine

_ROOT = Path(__file__).resolve().parents[1]
_MODES = ("full", "lora")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything and write the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model that trains anywhere")
    parser.add_argument("--out", type=Path, help="folder (default docs; on a CPU build/gpu-trial)")
    args = parser.parse_args(argv)
    out = args.out or _ROOT / ("docs" if args.device == "cuda" else "build/gpu-trial")
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_overlap: there is no CUDA device; try it out with --device cpu --tiny",
            file=sys.stderr,
        )
        if not (out / "gpu.md").exists():
            out.mkdir(parents=True, exist_ok=True)
            (out / "gpu.md").write_text(NOT_MEASURED, encoding="utf-8")
        return 1
    (out / "benchmarks").mkdir(parents=True, exist_ok=True)
    run = measure(args.device, out / "benchmarks", is_tiny=args.tiny)
    (out / "benchmarks" / "gpu.json").write_text(run.to_json(), encoding="utf-8")
    (out / "gpu.md").write_text(write_gpu_report(run), encoding="utf-8")
    print(f"wrote {out / 'gpu.md'}", file=sys.stderr)
    return 0


def measure(device: str, folder: Path, *, is_tiny: bool) -> GpuRun:
    """Run every part in processes of its own; the trace goes to the folder."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)

        def part(name: str, kind: type[P], *, ranks: int, on: str = device) -> P:
            print(f"{name} on {on}", file=sys.stderr, flush=True)
            file = work / f"{name}-{on}.json"
            _run(name, on, file, ranks=ranks, is_tiny=is_tiny)
            return read_part(file, kind)

        def on_cpu() -> list[Parity]:
            return [part(f"parity-{mode}", Parity, ranks=4, on="cpu") for mode in _MODES]

        parity = [part(f"parity-{mode}", Parity, ranks=4) for mode in _MODES]
        run = GpuRun(
            device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=Machine.here(),
            copies=part("copies", Copies, ranks=1),
            steps=part("steps", Steps, ranks=2),
            fsdp2=part("fsdp2", Fsdp2Peak, ranks=1),
            parity=parity,
            cpu_parity=parity if device == "cpu" else on_cpu(),
        )
        (folder / "gpu-trace.json.gz").write_bytes((work / "gpu-trace.json.gz").read_bytes())
        return run


def _run(name: str, device: str, file: Path, *, ranks: int, is_tiny: bool) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(_ROOT / "benchmarks" / "gpu_worker.py")]
    command += [name, device, str(file), *(["--tiny"] if is_tiny else [])]
    # A worker that was told to use the CPU must not find the GPU: fcdp would take it.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", **hidden}
    subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main())
