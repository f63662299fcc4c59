"""The section of gpu.md on steps of a large model: fcdp and other systems, by mode."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.gpu.results import Trained

_NAMES = {
    "fcdp": "fcdp, node shards in host memory",
    "fsdp2": "FSDP2, blocks compiled",
    "megatron": "megatron-fsdp, hybrid: optimizer over all ranks, parameters within a node",
    "plain": "no sharding, blocks compiled",
    "segments": "no sharding, fcdp's segments",
}


def training(found: Sequence[Trained]) -> list[str]:
    """Return the section; empty if no system has trained."""
    if not found:
        return []
    modes = list(dict.fromkeys(f.mode for f in found))
    return [
        "## Steps of a large model",
        _intro(found[0]),
        *(p for m in modes for p in _mode(m, found)),
    ]


def _intro(first: Trained) -> str:
    shape = first.shape
    return (
        f"One rank of {first.nodes} x {first.ranks_per_node}, of which only it exists: gathers fill their "
        "output with copies of its own part, on the streams where they would run, so memory and its traffic "
        "are real and links take no time. Losses are therefore those of no real training. The model is a GPT "
        f"of {shape.layers} layers x {shape.width}, {first.parameter_bytes / 1e9:.2f} GB in {first.dtype}, "
        f"with {shape.batch} x {shape.length} tokens a rank. Without sharding all is on the GPU, nothing is "
        "gathered, and the optimizer steps a rank's share; so their memory is no rank's."
    )


def _mode(mode: str, found: Sequence[Trained]) -> list[str]:
    chosen = [f for f in found if f.mode == mode]
    bases = [f for f in chosen if f.system in ("plain", "segments")]
    base_s = median(bases[0].step_s) if bases else None
    rows = [_row(f, base_s) for f in chosen]
    headers = ["system", "step s (least – most)", "to no sharding", "peak MiB", "first step s"]
    headers += ["gap at the start of a forward µs", "compute stream idle"]
    title = {"full": "### All parameters trained", "lora": "### LoRA"}[mode]
    return [title, table(rows, headers), *(_places(f) for f in chosen if f.system == "fcdp")]


def _row(found: Trained, base_s: float | None) -> tuple[str, ...]:
    step_s = median(found.step_s)
    gaps = found.gaps
    return (
        _NAMES[found.system],
        f"{step_s:.4f} ({min(found.step_s):.4f} – {max(found.step_s):.4f}, n={len(found.step_s)})",
        "" if base_s is None else f"{100 * (step_s / base_s - 1):+.1f} %",
        f"{found.peak_bytes / 2**20:.0f}",
        f"{found.first_step_s:.1f}",
        "" if gaps is None else ", ".join(f"{gap:.0f}" for gap in gaps.forward_start_us),
        "" if gaps is None else f"{100 * gaps.idle_part:.1f} %",
    )


def _places(found: Trained) -> str:
    """Return a paragraph on where fcdp kept its buckets, and on the predicted and the measured peak."""
    told = f"fcdp: all {found.host_buckets} buckets on the host, {found.host_bytes / 2**20:.0f} MiB in slabs."
    if found.predicted_peak_bytes is not None:
        ratio = found.passes_peak_bytes / found.predicted_peak_bytes
        told += (
            f" Its plan predicts a peak of {found.predicted_peak_bytes / 2**20:.0f} MiB; forward and "
            f"backward take {found.passes_peak_bytes / 2**20:.0f} MiB ({ratio:.2f} of that), the whole step "
            f"{found.peak_bytes / 2**20:.0f} MiB: what an optimizer's kernels make besides is in no plan."
        )
    if found.gaps is not None:
        told += f" Its trace is `docs/benchmarks/gpu/trace-fcdp-{found.mode}.json.gz` (Perfetto opens it)."
    return told


def table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table in Markdown; a bare machine has no tabulate."""
    lines = [headers, ["-" * max(3, len(h)) for h in headers], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
