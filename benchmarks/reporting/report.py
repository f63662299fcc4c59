"""The report: every table of docs/benchmarks.md, made from the rows alone.

No fixed sentence claims a result: code compares the systems by their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks.reporting.record import Record
from benchmarks.reporting.rows import Cell, ResultRow
from benchmarks.reporting.summary import LOSS_TOLERANCE, Summary, summarise
from benchmarks.reporting.targets import judge
from benchmarks.running.network import NETWORKS
from benchmarks.systems.names import BY_NAME, SYSTEMS, ShardedOver, System

MODE_TITLES = {"lora": "LoRA", "full": "Full fine-tuning"}
NETWORK_TITLES = {"unlimited": "unlimited", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}


def write_report(
    rows: Sequence[ResultRow], record: Record, *, plots: Sequence[Path], notes: str
) -> str:
    """Return the whole page as Markdown.

    plots: files, relative to the page.  notes: the authors' notes about these numbers, Markdown.
    """
    cells = summarise(rows)
    parts = [
        "# Benchmark",
        _setting(rows, record),
        "## Targets",
        _targets(cells),
        *([notes.strip()] if notes.strip() else []),
        "## When to use what",
        _advice(cells),
        "## Results",
        _legend(),
        *(f"![{path.stem}]({path.as_posix()})" for path in plots),
    ]
    for mode, title in MODE_TITLES.items():
        for k in sorted({c.accumulation for c in cells if c.mode == mode}):
            parts += [f"### {title}, accumulation {k}", _results(cells, mode, k)]
    parts += ["## The systems", _systems(cells)]
    if missing := _missing(record):
        parts += ["## Not measured", missing]
    return "\n\n".join(parts) + "\n"


def _setting(rows: Sequence[ResultRow], record: Record) -> str:
    machine, shape = record.machine, record.shape
    all_bytes = max((row.all_bytes for row in rows), default=shape.approximate_bytes)
    lora = next((row.trained_bytes for row in rows if row.mode == "lora"), None)
    trained = f"; LoRA trains {lora / 1e6:.2f} MB of adapters" if lora else ""
    first = (
        f"Measured on {record.date[:10]} by `make bench`; written by `benchmarks/reporting/report.py` from "
        "[raw rows](benchmarks/rows.json) and [settings](benchmarks/run.json)."
    )
    facts = {
        "Machine": f"{machine.processor}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, "
        f"{machine.system}. {record.nodes} x {record.ranks_per_node} ranks share the machine. The nodes "
        "are network namespaces with capped network cards. So compute is slow, and transfers compete with "
        "compute for the cores.",
        "Versions": f"{', '.join(machine.versions)}; fcdp at "
        f"{machine.commit or 'an unknown commit'}; Gloo, fp32.",
        "Model": f"GPT, {shape.layers} layers x {shape.width}, W = {all_bytes / 1e6:.1f} MB{trained}. "
        f"{shape.batch} x {shape.length} tokens per rank and micro-batch, AdamW, no dropout. All systems use "
        "the same seeds for weights and data.",
        "Order": "the systems run one after the other, each in fresh processes. Within a system, the "
        f"networks take turns, step by step. The benchmark took {record.elapsed_s / 60:.0f} "
        f"minutes.{_drift(rows)}",
    }
    return first + "\n\n" + "\n".join(f"* **{name}:** {text}" for name, text in facts.items())


def _drift(rows: Sequence[ResultRow]) -> str:
    """Say how steady the machine was, judged by equal compute measured at the start of every launch."""
    worst = 0.0
    for mode in MODE_TITLES:
        seconds = [row.compute_s for row in rows if row.mode == mode]
        if seconds:
            worst = max(worst, max(seconds) / min(seconds) - 1)
    if not rows:
        return ""
    return (
        " The same step without communication, measured at the start of each launch, took up to "
        f"{100 * worst:.0f} % longer in one launch than in another. Smaller differences mean little."
    )


def _targets(cells: Mapping[Cell, Summary]) -> str:
    rows = [
        (
            verdict.target,
            f"≤ {verdict.limit:.3g}",
            "–" if verdict.found is None else f"{verdict.found:.3f}",
            verdict.text,
            verdict.detail,
        )
        for verdict in judge(cells)
    ]
    return _table(rows, ["target (ratio)", "limit", "found", "", "from"], "lrrll")


def _advice(cells: Mapping[Cell, Summary]) -> str:
    """Return a table of the fastest systems, by how widely the training state must be sharded to fit."""
    fits = {
        "the whole state fits on every accelerator": (
            ShardedOver.NONE,
            ShardedOver.INTRA,
            ShardedOver.GLOBAL,
        ),
        "it fits when sharded within a node": (ShardedOver.INTRA, ShardedOver.GLOBAL),
        "it fits only when sharded over all ranks": (ShardedOver.GLOBAL,),
    }
    rows = []
    for mode, title in MODE_TITLES.items():
        for k in sorted({c.accumulation for c in cells if c.mode == mode}):
            for network in NETWORKS:
                here = [
                    s
                    for s in cells.values()
                    if (s.cell.mode, s.cell.accumulation, s.cell.network) == (mode, k, network)
                    and s.is_right
                ]
                choices = [
                    _fastest([s for s in here if s.system.state in states])
                    for states in fits.values()
                ]
                if here:
                    rows.append((title, k, NETWORK_TITLES[network], *choices))
    intro = (
        "The table shows the fastest of the measured systems, for three places where parameters, "
        "gradients and optimizer state have to fit. ZeRO-3, FSDP and fcdp are made for the last column. "
        "In this column, systems that keep node shards of the parameters on the accelerator (hpZ, "
        "node-sized reshard) also need room for the node shards. Times within a few percent of each other "
        "are a tie. The tables below show all systems."
    )
    return f"{intro}\n\n{_table(rows, ['', 'accumulation', 'network', *fits], 'lrllll')}"


def _fastest(found: list[Summary]) -> str:
    if not found:
        return "–"
    ranked = sorted(found, key=lambda s: s.step_s)
    text = f"**{ranked[0].system.title}** {ranked[0].step_s:.2f} s"
    if len(ranked) > 1:
        text += f", then {ranked[1].system.title} {ranked[1].step_s:.2f} s"
    return text


def _legend() -> str:
    return (
        "*sent*: bytes that left a node's network card in one optimizer step, including headers; the mean "
        "of nodes and steps on all networks; also in multiples of W. *step*: median seconds of the "
        "slowest rank, (least – most), n steps, without compilation and warm-up. *first*: the first step, "
        "with compilation. *memory*: how far the heap of the largest rank grew, at its peak in a step "
        "after the first, since before the model was made; tensors are in the heap; host memory is not "
        "included. *host*: parameters of the largest rank that would be in host memory if there were an "
        "accelerator; add them to *memory*. *loss*: the loss after the steps that all systems share; if "
        f"the losses of a row differ from DDP's by more than {LOSS_TOLERANCE:g} (relative), the row says "
        "WRONG."
    )


def _results(cells: Mapping[Cell, Summary], mode: str, accumulation: int) -> str:
    networks = [n for n in NETWORKS if any(c.network == n for c in cells)]
    table = []
    for system in SYSTEMS:
        found = {
            n: cells[cell]
            for n in networks
            if (cell := Cell(system.name, mode, accumulation, n)) in cells
        }
        if found:
            table.append(_result(system, found, networks))
    headers = ["", "sharded over", "sent MB", "sent / W"]
    headers += [f"step s, {NETWORK_TITLES[n]}" for n in networks]
    headers += ["first s", "memory MiB", "host MiB", "loss"]
    return _table(table, headers, "llrr" + "r" * len(networks) + "rrrl")


def _result(
    system: System, found: Mapping[str, Summary], networks: Sequence[str]
) -> tuple[str, ...]:
    every = list(found.values())
    steps = sum(s.n for s in every)
    sent_bytes = sum(s.sent_bytes * s.n for s in every) / steps
    return (
        system.title,
        system.state.value,
        f"{sent_bytes / 1e6:.2f}",
        f"{sent_bytes / every[0].all_bytes:.4f}",
        *(_time(found[n]) if n in found else "–" for n in networks),
        f"{max(s.first_step_s for s in every):.1f}",
        f"{max(s.heap_bytes for s in every) / 2**20:.0f}",
        f"{max(s.host_bytes for s in every) / 2**20:.0f}",
        _loss(every),
    )


def _time(summary: Summary) -> str:
    if summary.n == 1:
        return f"{summary.step_s:.2f} (n=1)"
    spread = f"{summary.least_s:.2f} – {summary.most_s:.2f}"
    return f"{summary.step_s:.2f} ({spread}, n={summary.n})"


def _loss(every: Sequence[Summary]) -> str:
    if wrong := next((s.wrong for s in every if s.wrong), None):
        return f"**WRONG**: {wrong}"
    text = f"{every[0].loss:.4f} after {every[0].losses}"
    return text if all(s.is_checked for s in every) else f"{text}, unchecked"


def _systems(cells: Mapping[Cell, Summary]) -> str:
    measured = {cell.system for cell in cells}
    lines = [f"* **{s.title}**: {s.about}." for s in SYSTEMS if s.name in measured]
    return "\n".join(lines)


def _missing(record: Record) -> str:
    lines = [
        f"* {BY_NAME[failure.system].title}, {MODE_TITLES[failure.mode]}: {failure.why}"
        for failure in record.failures
    ]
    lines += [
        f"* {BY_NAME[s.cell.system].title}, {MODE_TITLES[s.cell.mode]}, accumulation "
        f"{s.cell.accumulation}, {NETWORK_TITLES[s.cell.network]}: left out for time; a step would take "
        f"about {s.step_s:.0f} s"
        for s in record.skipped
    ]
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[object]], headers: Sequence[str], align: str) -> str:
    sides = {"l": "left", "r": "right"}
    return tabulate(
        rows,
        headers=headers,
        tablefmt="github",
        colalign=[sides[side] for side in align[: len(headers)]] if rows else None,
        disable_numparse=True,
    )
