"""docs/gpu.md: what was found on one GPU, or that nothing has been measured on one yet."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tabulate import tabulate

from benchmarks.gpu_parts import Copies, GpuRun, Parity, Steps
from benchmarks.machine import Machine

LOSS_TOLERANCE = 1e-4
NOT_MEASURED = """# On one GPU

Not measured on a GPU yet. `python benchmarks/gpu_overlap.py` on a machine with one replaces this page: copies
of the pinned pool against cudaMemcpy, a LoRA step with host-cached weights against one with everything on
the GPU, peak device memory against FSDP2's, four ranks on one GPU over Gloo, and a profiler trace. Its CPU
path is tested.
"""


def write_gpu_report(run: GpuRun) -> str:
    """The page as Markdown; what was tried out on a CPU says so in its first line."""
    machine = run.machine
    is_trial = run.device == "cpu"
    parts = [
        "# A trial of the script on a CPU: no finding" if is_trial else "# On one GPU",
        _setting(run.date, run.device, machine),
        "## Copies",
        _copies(run.copies),
        "## Host-cached weights",
        *_steps(run.steps, run.fsdp2.peak_bytes),
        "## Four ranks on one device over Gloo",
        _parity(run.parity, run.cpu_parity),
    ]
    return "\n\n".join(parts) + "\n"


def _setting(date: str, device: str, machine: Machine) -> str:
    return (
        f"Measured on {date[:10]} by `benchmarks/gpu_overlap.py` on {device} ({machine.processor}, "
        f"{machine.cores} cores, {machine.system}; {', '.join(machine.versions)}; fcdp at "
        f"{machine.commit or 'an unknown commit'})."
    )


def _copies(copies: Copies) -> str:
    ways = {
        "pool": (copies.pool_h2d_s, copies.pool_d2h_s),
        "plain cudaMemcpy": (copies.plain_h2d_s, copies.plain_d2h_s),
    }
    rows = [
        (name, *(f"{copies.copied_bytes / median(seconds) / 1e9:.2f}" for seconds in both))
        for name, both in ways.items()
    ]
    ratios = (
        median(copies.plain_h2d_s) / median(copies.pool_h2d_s),
        median(copies.plain_d2h_s) / median(copies.pool_d2h_s),
    )
    rows.append(("ratio", *(f"{ratio:.3f}" for ratio in ratios)))
    intro = (
        f"{copies.copied_bytes / 2**20:.0f} MiB at a time, GB/s, median of {len(copies.pool_h2d_s)}, taken "
        "in turns; the target is a ratio of at least 0.95."
    )
    return f"{intro}\n\n{_table(rows, ['', 'H2D', 'D2H'])}"


def _steps(steps: Steps, fsdp2_peak_bytes: int) -> list[str]:
    shape = steps.shape
    setting = (
        f"LoRA on a GPT of {shape.layers} layers x {shape.width} ({steps.frozen_bytes / 1e9:.2f} GB frozen, "
        f"{steps.dtype}), {shape.batch} x {shape.length} tokens a rank; {steps.ranks} ranks share the device "
        f"as {steps.ranks} nodes and take steps in turn with the other system."
    )
    rows = [
        ("cached in host memory", _spread(steps.cached_s)),
        ("all on the device (DDP, compiled)", _spread(steps.resident_s)),
    ]
    added = median(steps.cached_s) / median(steps.resident_s) - 1
    trace = (
        "A trace of one step with its transfers is in `benchmarks/gpu-trace.json.gz` (Perfetto opens it)."
        if steps.has_trace
        else "The trace of a step shows **no** loads of ours."
    )
    time = (
        f"Added time: {100 * added:+.1f} % (target: at most 3 %). In host memory: "
        f"{steps.host_bytes / 2**20:.0f} MiB a rank. {trace}"
    )
    memory = (
        f"Peak device memory of a rank: {steps.cached_peak_bytes / 2**20:.0f} MiB; of FSDP2 with as many "
        f"ranks: {fsdp2_peak_bytes / 2**20:.0f} MiB ({steps.cached_peak_bytes / fsdp2_peak_bytes:.2f} of it)."
    )
    return [setting, _table(rows, ["", "step s (least – most)"]), time, memory]


def _parity(found: Sequence[Parity], cpu: Sequence[Parity]) -> str:
    rows = []
    for ours, theirs in zip(found, cpu, strict=True):
        worst = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, ours.ddp_losses, strict=True))
        same = "the same" if ours.traffic == theirs.traffic else "**DIFFERENT**"
        rows.append(
            (
                ours.mode,
                f"{ours.losses[-1]:.5f}",
                f"{worst:.1e}" + ("" if worst <= LOSS_TOLERANCE else " **WRONG**"),
                same,
                ", ".join(f"{name} {count}" for name, count in ours.traffic.items() if count),
            )
        )
    headers = ["mode", "last loss", "off DDP (relative)", "traffic, to a CPU", "bytes, last step"]
    return _table(rows, headers)


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.4f} ({min(seconds):.4f} – {max(seconds):.4f}, n={len(seconds)})"


def _table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
