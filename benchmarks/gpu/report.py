"""Write gpu.md: the findings on one GPU, part by part, and why a part did not run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import (
    Copies,
    CudaTests,
    Ending,
    LaneRuns,
    Outcome,
    Parity,
    ParityCase,
    Trained,
    Watched,
)
from benchmarks.gpu.training_report import table, training

F = TypeVar("F", CudaTests, Copies, LaneRuns, Parity, Watched)

TOLERANCES = {"float32": (1e-4, 1e-3), "bfloat16": (5e-3, 3e-2)}
"""The largest relative differences of losses and of parameters, by dtype.

On four CPU ranks, with ATen's kernels: 9e-8 and 4e-7 in float32, 4e-5 and 7e-3 in bfloat16.
"""

_RUN = """Run the benchmark with `make gpu`, or `python -m benchmarks.gpu` in a checkout. It needs a
Python with torch and numpy and one GPU or several, installs nothing, needs no network and takes at most ten
minutes. Every part runs in its own processes, within a share of the remaining time, and writes
`docs/benchmarks/gpu/PART.json` when it ends; if it fails, `PART-RANK.log` beside it has all that its ranks
printed, with the stacks of ranks that hung, and `PART-flight-RANK.json.gz` has their last collectives. A part
of fcdp that fails runs once more without Inductor and with `CUDA_LAUNCH_BLOCKING=1`. `build/gpu.tar.gz` has
all of it. `--parts` chooses parts, `--seconds` sets another limit; `--device cpu --quick` tries the benchmark
on a CPU in `build/gpu-trial`, and `--device sim --quick` does so on the simulated device of the tests.
"""

_PLAIN = "without Inductor and with `CUDA_LAUNCH_BLOCKING=1`"

NOT_MEASURED = f"""# On one GPU

**fcdp has not run on a GPU yet.** The CUDA code has been checked by reading and by tests on simulated
streams. The first run on a GPU will replace this page by its results.

{_RUN}
The benchmark has these parts:

{{parts}}
"""


def write_page(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the page with the findings so far, in place of the older page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(outcomes), encoding="utf-8")


def page_before() -> str:
    """Return the page for the time before the first run on a GPU."""
    return NOT_MEASURED.format(parts="\n".join(f"- {part.title}" for part in PARTS))


def page(outcomes: Sequence[Outcome]) -> str:
    """Return the page as Markdown; its title says if the run was a trial."""
    if not outcomes:
        return page_before()
    by_name = {outcome.part: outcome for outcome in outcomes}
    first = outcomes[0]
    title = "# On one GPU"
    if first.device in ("cpu", "sim"):
        title = f"# A trial of the benchmark on the device `{first.device}`: no finding"
    sections = [
        title,
        _setting(first),
        _ends(by_name),
        *_section("Tests that need a CUDA device", by_name.get("tests"), CudaTests, _tests),
        *_section("Copies", by_name.get("copies"), Copies, _copies),
        *_section("Lanes and collectives", by_name.get("lanes"), LaneRuns, _lanes),
        *_section("Ranks on one card, eager", by_name.get("parity-eager"), Parity, _parity),
        *_section("Ranks on one card, Inductor", by_name.get("parity"), Parity, _parity),
        *_section("Ranks on several cards over NCCL", by_name.get("nccl"), Parity, _parity),
        *training([o.found for o in outcomes if isinstance(o.found, Trained)]),
        *_section("CUDA sanitizer", by_name.get("sanitizer"), Watched, _watched),
        *_printed(by_name.get("sanitizer")),
        *_section("Order of the streams", by_name.get("streams"), Watched, _watched),
        *_printed(by_name.get("streams")),
        "## Again",
        _RUN,
        "## Verdict",
        _verdict(outcomes),
    ]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def faults(outcome: Outcome) -> list[str]:
    """Return what is wrong with a part, in sentences without a full stop; nothing if it has no fault."""
    told = []
    if outcome.state in (Ending.FAILED, Ending.TIMEOUT):
        told.append(outcome.reason)
        if outcome.again == Ending.DONE.value:
            told.append(f"{_PLAIN} it ends: the fault is Inductor's or in the order of streams")
        elif outcome.again:
            told.append(f"{_PLAIN}: {outcome.again}")
    match outcome.found:
        case LaneRuns(runs=runs):
            told += [
                f"the lane's task {r.name!r} has a wrong result" for r in runs if not r.is_right
            ]
        case Copies(is_pinned=False):
            told.append("the slab is not registered with CUDA, so its copies are slow and block")
        case CudaTests(failures=failures):
            told += failures
        case Parity(cases=cases):
            told += [f"{_case(c)}: {why}" for c in cases for why in _wrong(c)]
        case Watched(by=by, finds_planted=False):
            told.append(f"`{by}` did not find a race that was made on purpose")
        case Trained(losses=losses) if not all(map(math.isfinite, losses)):
            told.append(f"a loss is not finite: {losses}")
    return told


def _verdict(outcomes: Sequence[Outcome]) -> str:
    lines = []
    for outcome in outcomes:
        if found := faults(outcome):
            again = f"`python -m benchmarks.gpu --parts {outcome.part} --seconds 300`"
            lines += [
                f"- **{outcome.part}** ({again} runs it alone):",
                *(f"    - {_cell(why)}" for why in found),
            ]
    ended = [o.part for o in outcomes if o.state is Ending.DONE]
    missing = [part.name for part in PARTS if part.name not in ended]
    held = f"{len(ended)} of {len(PARTS)} parts are done"
    held += f"; not done: {', '.join(missing)}." if missing else "."
    if not lines:
        return f"No fault was found. {held}"
    wrong = "**Faults were found**; attach `build/gpu.tar.gz` to an issue."
    return "\n".join([f"{wrong} {held}", "", *lines])


def _setting(first: Outcome) -> str:
    machine = first.machine
    return (
        f"Measured by `python -m benchmarks.gpu` on {first.device} "
        f"({machine.processor}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, "
        f"{machine.system}; {', '.join(machine.versions)})."
    )


def _ends(by_name: Mapping[str, Outcome]) -> str:
    rows = []
    for part in PARTS:
        outcome = by_name.get(part.name)
        if outcome is None:
            why = "it was not chosen, or there was no time left"
            rows.append((part.title, "**not run**", "", "", why))
            continue
        state = (
            outcome.state.value if outcome.state is Ending.DONE else f"**{outcome.state.value}**"
        )
        took = f"{outcome.elapsed_s:.0f} of {outcome.limit_s:.0f}"
        when = f"{outcome.date[:10]}, {outcome.machine.commit or 'unknown'}"
        rows.append((part.title, state, took, when, _cell(outcome.reason)))
    return table(rows, ["part", "", "s", "date, commit of fcdp", "why"])


def _cell(text: str) -> str:
    """Shorten and escape a text for a cell of a table."""
    shown = text if len(text) <= 300 else text[:300] + " …"
    return shown.replace("|", "\\|").replace("<", "&lt;")


def _section(
    title: str,
    outcome: Outcome | None,
    kind: type[F],
    write: Callable[[F], list[str]],
) -> list[str]:
    """Return a part's section; empty without a finding, as the first table then says why."""
    if outcome is None or not isinstance(outcome.found, kind):
        return []
    return [f"## {title}", *write(outcome.found)]


def _printed(outcome: Outcome | None) -> list[str]:
    """Return the output of a part's processes, if the part ran."""
    if outcome is None or outcome.state is Ending.NOT_RUN or not outcome.printed:
        return []
    return [
        "\n".join(
            [f"The last lines that `{outcome.part}` printed:", "", "```", *outcome.printed, "```"]
        )
    ]


def _tests(found: CudaTests) -> list[str]:
    counts = f"{found.passed} passed, {found.failed} failed, {found.skipped} were skipped."
    return (
        [counts, "\n".join(f"- {_cell(line)}" for line in found.failures)]
        if found.failures
        else [counts]
    )


def _copies(copies: Copies) -> list[str]:
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
    pinned = "**not registered with CUDA**" if copies.is_pinned is False else "registered with CUDA"
    intro = (
        f"{copies.copied_bytes / 2**20:.0f} MiB at a time, GB/s, median of {len(copies.pool_h2d_s)}, taken "
        f"in turns; the slab is {pinned}; the target is a ratio of at least 0.95."
    )
    return [intro, table(rows, ["", "H2D", "D2H"])]


def _lanes(found: LaneRuns) -> list[str]:
    where = "on threads" if found.is_blocking else "on streams"
    intro = (
        f"In a {found.backend} group of one rank, {where}. Right: compute gets the right result from a "
        "lane that uses a result of compute, while both are busy. Issue: the time that the Python thread "
        "needs to start a small task. NCCL may average wrongly in a group of one rank (torch's FSDP "
        "avoids this); outside of this benchmark fcdp uses no collectives in such groups."
    )
    rows = [(r.name, "yes" if r.is_right else "**WRONG**", f"{r.issue_us:.1f}") for r in found.runs]
    return [intro, table(rows, ["task", "right", "issue µs"])]


def _parity(found: Parity) -> list[str]:
    rows = []
    for case in found.cases:
        rows.append(
            (
                _case(case),
                f"{case.losses[-1]:.5f}",
                f"{_losses_off(case):.1e}",
                f"{case.parameters_off:.1e}" + (" **WRONG**" if _wrong(case) else ""),
                f"{case.host_bytes / 2**20:.1f}",
                ", ".join(f"{name} {count}" for name, count in case.traffic.items()),
            )
        )
    headers = ["case", "last loss", "losses off", "parameters off", "slabs MiB"]
    headers += ["bytes of the last step"]
    limits = ", ".join(f"{loss:.0e} and {own:.0e} in {d}" for d, (loss, own) in TOLERANCES.items())
    intro = (
        f"{len(found.cases)} of {found.planned} cases, each compared with the same model without fcdp, "
        "compiled by torch. Differences are relative; those of losses and of parameters are wrong beyond "
        f"{limits}, and bytes are wrong if they are not the plan's."
    )
    if found.missing:
        intro += f" QLoRA was left out, because {', '.join(found.missing)} is not installed."
    return [intro, table(rows, headers)]


def _case(case: ParityCase) -> str:
    told = [case.mode, case.strategy, case.dtype, case.compute]
    told += [f"device_memory={case.device_memory}"] if case.device_memory else []
    told += ["checkpointing and dropout"] if case.is_checkpointed else []
    return ", ".join(told)


def _losses_off(case: ParityCase) -> float:
    pairs = zip(case.losses, case.plain_losses, strict=True)
    return max(abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in pairs)


def _wrong(case: ParityCase) -> list[str]:
    of_losses, of_parameters = TOLERANCES[case.dtype]
    told = []
    if not (off := _losses_off(case)) <= of_losses:
        told.append(f"losses are off by {off:.1e}")
    if not case.parameters_off <= of_parameters:
        told.append(f"parameters are off by {case.parameters_off:.1e}")
    if case.unplanned:
        told.append(f"bytes are not the plan's: {case.unplanned}")
    return told


def _watched(found: Watched) -> list[str]:
    planted = {
        None: "",
        True: " It finds a race that was made on purpose.",
        False: " **It did not find a race that was made on purpose**, so this result means nothing.",
    }[found.finds_planted]
    if not found.steps:
        return [f"No step ended under `{found.by}`; the first table says why.{planted}"]
    return [
        f"{found.steps} steps with host-cached weights under `{found.by}`, nothing found.{planted}"
    ]
