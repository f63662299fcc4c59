from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu.__main__ import _earlier, main
from benchmarks.gpu.driver import EXIT_NOT_RUN, FLIGHTS, STACKS, run_parts, stuck_at
from benchmarks.gpu.linked import link_tree
from benchmarks.gpu.parts import PARTS, GpuPart
from benchmarks.gpu.report import faults, page, page_before
from benchmarks.gpu.results import (
    Copies,
    CudaTests,
    Ending,
    Found,
    Gaps,
    LaneRun,
    LaneRuns,
    Outcome,
    Parity,
    ParityCase,
    Trained,
    Watched,
    read_outcome,
    write_outcome,
)
from benchmarks.gpu.workers.cuda_tests import read_report
from benchmarks.gpu.workers.echo import EchoGroup
from benchmarks.gpu.workers.traces import FORWARD, gaps_of, kept_events
from benchmarks.running.machine import MachineRecord
from benchmarks.systems.shape import QUICK
from builders_bench import make_record

ROOT = Path(__file__).resolve().parents[2]

COPIES = Copies(
    copied_bytes=2**30,
    is_pinned=True,
    pool_h2d_s=[0.05, 0.04, 0.09],
    plain_h2d_s=[0.05, 0.05, 0.05],
    pool_d2h_s=[0.1, 0.1, 0.1],
    plain_d2h_s=[0.05, 0.05, 0.05],
)
CASE = ParityCase(
    mode="lora",
    strategy="fcdp",
    dtype="float32",
    compute="inductor",
    device_memory="",
    is_checkpointed=True,
    losses=[5.0, 4.0],
    plain_losses=[5.0, 4.0],
    parameters_off=1e-7,
    host_bytes=2**20,
    traffic={"inter all_gather": 7},
    unplanned="",
)
PLAIN = Trained(
    system="plain",
    mode="full",
    shape=QUICK,
    dtype="bfloat16",
    nodes=2,
    ranks_per_node=8,
    parameter_bytes=10**9,
    first_step_s=9.0,
    step_s=[1.0, 0.9, 1.1],
    losses=[5.0],
    peak_bytes=2**31,
    passes_peak_bytes=2**31,
)
FCDP = replace(
    PLAIN,
    system="fcdp",
    step_s=[1.02, 1.0, 1.5],
    peak_bytes=2**30,
    passes_peak_bytes=2**29,
    predicted_peak_bytes=2**29,
    host_bytes=2**27,
    host_buckets=7,
    gaps=Gaps(forward_start_us=[12.0, 13.0], idle_part=0.25, kernels=99),
)
LANES = LaneRuns(
    backend="nccl", is_blocking=False, runs=[LaneRun(name="copy", is_right=True, issue_us=9.0)]
)
FOUND: dict[str, Found] = {
    "copies": COPIES,
    "lanes": LANES,
    "fcdp-full": FCDP,
    "plain-full": PLAIN,
    "parity": Parity(planned=9, cases=[CASE], missing=["peft"]),
    "tests": CudaTests(passed=10, failed=1, skipped=0, failures=["a::b: it is 1 | 2"]),
    "sanitizer": Watched(by="csan", steps=3, finds_planted=True),
}


def outcome(name: str, found: Found | None, *, device: str = "Card") -> Outcome:
    return Outcome(
        part=name,
        state=Ending.FAILED if found is None else Ending.DONE,
        reason="CUDA error: out of memory" if found is None else "",
        again="",
        elapsed_s=1.0,
        limit_s=2.0,
        date="2026-01-02T03:04:05+00:00",
        device=device,
        machine=make_record().machine,
        printed=["a line"],
        found=found,
    )


# --- the page ---------------------------------------------------------------------------------------------


def cells(text: str) -> list[list[str]]:
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines()]


def test_page_shows_what_was_found_and_why_the_rest_was_not() -> None:
    outcomes = [outcome(name, found) for name, found in FOUND.items()]
    text = page([*outcomes, outcome("fsdp2-full", None)])
    assert text.startswith("# On one GPU\n")
    rows = cells(text)
    assert ["pool", "21.47", "10.74"] in rows
    assert ["ratio", "1.000", "0.500"] in rows
    assert ["copy", "yes", "9.0"] in rows
    failed = ["the same: FSDP2", "**failed**", "1 of 2", "2026-01-02, abc"]
    assert [*failed, "CUDA error: out of memory"] in rows
    assert any(row[:2] == ["LoRA: no sharding, compiled by blocks", "**not run**"] for row in rows)
    (fcdp,) = [row for row in rows if row[0] == "fcdp, node shards in host memory"]
    assert fcdp[1:4] == ["1.0200 (1.0000 – 1.5000, n=3)", "+2.0 %", "1024"]
    assert fcdp[5:] == ["12, 13", "25.0 %"]
    assert "predicts a peak of 512 MiB" in text
    assert "(1.00 of that)" in text
    assert "10 passed, 1 failed" in text
    assert "WRONG" not in text


def test_the_page_and_its_verdict_say_what_is_wrong() -> None:
    def parity(**more: Any) -> Parity:
        return Parity(planned=1, cases=[replace(CASE, **more)], missing=[])

    wrong: list[tuple[str, Found, str, str]] = [
        ("parity", parity(losses=[5.0, 4.1]), "**WRONG**", "losses are off by 2.5e-02"),
        ("parity", parity(losses=[5.0, math.nan]), "**WRONG**", "losses are off by inf"),
        ("parity", parity(parameters_off=0.1), "**WRONG**", "parameters are off by 1.0e-01"),
        ("parity", parity(unplanned="load 1 instead of 2"), "**WRONG**", "load 1 instead of 2"),
        (
            "lanes",
            replace(LANES, runs=[LaneRun(name="copy", is_right=False, issue_us=1.0)]),
            "**WRONG**",
            "'copy' has a wrong result",
        ),
        (
            "copies",
            replace(COPIES, is_pinned=False),
            "**not registered with CUDA**",
            "the slab is not registered",
        ),
        (
            "sanitizer",
            Watched(by="csan", steps=3, finds_planted=False),
            "**It did not find",
            "`csan` did not find a race",
        ),
        ("plain-full", replace(PLAIN, losses=[math.nan]), "", "a loss is not finite"),
    ]
    for name, found, told, verdict in wrong:
        text, right = page([outcome(name, found)]), page([outcome(name, FOUND[name])])
        assert told in text
        assert verdict in text.partition("## Verdict")[2]
        assert not told or told not in right
        assert "No fault was found. 1 of" in right.partition("## Verdict")[2]
    assert not faults(outcome("parity", parity(losses=[5.0, 4.01], dtype="bfloat16")))


@pytest.mark.parametrize(
    ("again", "expected"),
    [("done", "it ends: the fault is"), ("failed: no memory", "failed: no memory"), ("", "")],
)
def test_a_part_that_failed_twice_is_another_fault_than_one_that_failed_once(
    again: str, expected: str
) -> None:
    found = faults(replace(outcome("fcdp-full", None), again=again))
    assert found[0] == "CUDA error: out of memory"
    assert expected in "".join(found[1:])
    assert len(found) == 1 + bool(again)


def test_the_page_keeps_what_this_machine_found_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = MachineRecord.here()
    kinds = {
        "copies": replace(outcome("copies", COPIES), machine=replace(here, commit="older")),
        "lanes": replace(outcome("lanes", LANES, device="another card"), machine=here),
        "tests": replace(outcome("tests", FOUND["tests"]), machine=replace(here, versions=[])),
        "parity": replace(outcome("parity", FOUND["parity"]), machine=here),
    }
    for name, found in kinds.items():
        write_outcome(tmp_path / f"{name}.json", found)
    (tmp_path / "streams.json").write_text("{}")
    chosen = [part for part in PARTS if part.name == "parity"]
    assert _earlier(tmp_path, chosen, "Card") == [kinds["copies"]]
    assert "streams.json is of another version" in capsys.readouterr().err


def test_a_trial_on_a_cpu_is_no_finding() -> None:
    assert page([outcome("copies", COPIES, device="cpu")]).startswith("# A trial")


def test_the_page_in_the_repository_says_that_nothing_was_run_until_something_was() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    was_run = (ROOT / "docs" / "benchmarks" / "gpu").exists()
    assert was_run or text == page_before()


@pytest.mark.parametrize("name", [*FOUND, "fsdp2-full"])
def test_outcomes_survive_their_file(name: str, tmp_path: Path) -> None:
    written = outcome(name, FOUND.get(name))
    write_outcome(tmp_path / "part.json", written)
    assert read_outcome(tmp_path / "part.json") == written


# --- the driver -------------------------------------------------------------------------------------------

WRITES = """
import pathlib, sys
sys.path.insert(0, {root!r})
from benchmarks.gpu.results import Watched, write_found
write_found(pathlib.Path({file!r}), Watched(by="a test", steps=1, finds_planted=None))
"""
THEN = {
    "good": "",
    "raises": "raise ValueError('it is broken')",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "elsewhere": f"print('there is no card'); sys.exit({EXIT_NOT_RUN})",
    "ranks": "import os, time\nif os.environ['RANK'] == '2': sys.exit('rank 2 is lost')\ntime.sleep(99)",
    "hangs": "import subprocess as s\np = s.Popen(['sleep', '99'])\nprint(p.pid, flush=True)\np.wait()",
    "many": "",
    "last": "import os; assert os.environ['CUDA_VISIBLE_DEVICES'] == '0'",
}


@pytest.mark.slow
def test_whatever_happens_to_a_part_the_others_run(tmp_path: Path) -> None:
    parts = [
        GpuPart(
            name=name,
            title=name,
            runs="",
            weight=2 if name == "hangs" else 10,
            ranks=3 if name == "ranks" else 1,
            cards=2 if name == "many" else 1,
            tries_again=name in ("raises", "killed"),
        )
        for name in THEN
    ]

    def command(part: GpuPart, file: Path, seconds: float, is_plain: bool) -> list[str]:
        written = WRITES.format(root=str(ROOT), file=str(file))
        then = "" if is_plain and part.name == "raises" else THEN[part.name]
        return [sys.executable, "-c", f"{written}\n{then}"]

    told: list[str] = []

    def ended(outcome: Outcome) -> None:
        assert read_outcome(tmp_path / f"{outcome.part}.json") == outcome, "it is written at once"
        told.append(outcome.part)

    began_s = time.monotonic()
    outcomes = run_parts(
        parts, command=command, folder=tmp_path, budget_s=60.0, device="cpu", cards=1, ended=ended
    )
    assert time.monotonic() - began_s < 60
    assert told == list(THEN)
    found = {o.part: o for o in outcomes}
    many = found.pop("many")
    assert (many.state, many.reason) == (
        Ending.NOT_RUN,
        "it needs 2 GPUs, and this machine has 1",
    )
    assert all(o.found == Watched(by="a test", steps=1, finds_planted=None) for o in found.values())
    assert [found[n].state for n in ("good", "last")] == [Ending.DONE] * 2
    assert found["raises"].state is Ending.FAILED
    assert found["raises"].reason.endswith("ValueError: it is broken")
    assert found["raises"].again == "done"
    assert found["killed"].reason.startswith("SIGKILL ended it")
    assert found["killed"].again.startswith("failed: SIGKILL ended it")
    assert found["hangs"].again == ""
    assert (found["elsewhere"].state, found["elsewhere"].reason) == (
        Ending.NOT_RUN,
        "there is no card",
    )
    assert found["ranks"].reason.endswith("rank 2 is lost")
    assert found["hangs"].state is Ending.TIMEOUT
    logs = {file.stem for file in tmp_path.glob("*.log")}
    assert logs == {
        "raises-0",
        "killed-0",
        "killed-again-0",
        "elsewhere-0",
        "ranks-0",
        "ranks-1",
        "ranks-2",
        "hangs-0",
    }
    assert "it is broken" in (tmp_path / "raises-0.log").read_text()
    child = int(found["hangs"].printed[-1])
    assert not is_running(child), "what a part has started ends with it"


STUCK = """
import sys, threading, types
from benchmarks.gpu import worker
from benchmarks.gpu.parts import GpuPart

def wait_for_ever(setting):
    print("stuck", flush=True)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

sys.modules["benchmarks.gpu.workers.stuck"] = types.SimpleNamespace(wait_for_ever=wait_for_ever)
part = GpuPart(name="stuck", title="", weight=1, runs="stuck.wait_for_ever")
worker._BY_NAME = {"stuck": part}
worker.main(["stuck", "--device", "cpu", "--seconds", "9", "--out", sys.argv[1]])
"""


def test_a_part_that_is_stuck_tells_where_before_it_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, str(tmp_path / "found.json")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        process.send_signal(FLIGHTS)
        flights = tmp_path / "stuck-flight-0.json.gz"
        until_s = time.monotonic() + 60
        while not flights.exists() and time.monotonic() < until_s:
            time.sleep(0.05)
        process.send_signal(STACKS)
        time.sleep(1.0)
        process.kill()
        _, told = process.communicate()
    assert stuck_at(told.splitlines()).startswith("its main thread was in wait_for_ever (<string>:")
    assert "version" in json.loads(gzip.decompress(flights.read_bytes()))


def test_links_to_the_checkout_are_the_package(tmp_path: Path) -> None:
    asked = (
        "import fcdp_compile.runtime as r, fcdp_compile.passes, importlib.metadata as m; "
        "print(r.__file__, next(e.value for e in m.entry_points(name='fcdp') "
        "if e.group == 'torch_dynamo_backends'), m.distribution('fcdp').locate_file('').resolve())"
    )
    tree = link_tree(tmp_path / "tree")
    ran = subprocess.run(
        [sys.executable, "-c", asked],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=True,
    )
    runtime, backend, distribution = ran.stdout.split()
    assert Path(runtime).is_relative_to(tree)
    assert (backend, tree.samefile(distribution)) == ("fcdp_compile.backend:fcdp", True)


def is_running(pid: int) -> bool:
    """Whether a process runs; an ended process that nobody has waited for (a zombie) does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 1
    assert "no CUDA device can be used (" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "what was found before stays"


# --- the group of which only one rank exists ---------------------------------------------------------------


def test_the_other_ranks_of_an_echo_group_do_what_this_one_does() -> None:
    group = EchoGroup(1, 3)
    mine = torch.tensor([5.0, 6.0])
    gathered = torch.empty(6)
    group.all_gather_single(gathered, mine)
    assert gathered.tolist() == [5, 6] * 3
    many, all_of_them = torch.arange(8.0), torch.empty(24)  # rows of 32 bytes
    group.all_gather_single(all_of_them, many)
    assert all_of_them.tolist() == many.tolist() * 3
    within = torch.tensor([0.0, 0.0, 5.0, 6.0, 0.0, 0.0])  # the input is a part of the output
    group.all_gather_single(within, within[2:4])
    assert within.tolist() == [5, 6] * 3
    options = dist.ReduceScatterOptions()
    for op, expected in ((dist.ReduceOp.SUM, [6.0, 9.0]), (dist.ReduceOp.AVG, [2.0, 3.0])):
        options.reduceOp = op
        part = torch.empty(2)
        group.reduce_scatter_single(part, torch.arange(6.0), options)
        assert part.tolist() == expected
    swapped = torch.empty(6)
    group.all_to_all_single(swapped, torch.arange(6.0))
    assert swapped.tolist() == [2, 3] * 3
    options.reduceOp = dist.ReduceOp.PRODUCT
    with pytest.raises(NotImplementedError, match="does not reduce"):
        group.reduce_scatter_single(torch.empty(2), torch.arange(6.0), options)


# --- what parts read --------------------------------------------------------------------------------------


def kernel(start: float, end: float, *, stream: int = 7, launch: int = 0) -> dict[str, object]:
    args = {"correlation": launch}
    return {
        "ph": "X",
        "cat": "kernel",
        "tid": stream,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def launch(at: float, number: int, category: str = "cuda_runtime") -> dict[str, object]:
    args = {"correlation": number}
    return {"ph": "X", "cat": category, "tid": 1, "ts": at, "dur": 1, "args": args}


def forward(start: float, end: float) -> dict[str, object]:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": FORWARD,
        "tid": 1,
        "ts": start,
        "dur": end - start,
    }


def test_gaps_are_those_before_the_first_kernel_that_a_forward_launched() -> None:
    events = [
        # The Python thread is far ahead: kernels of the first step run during the second forward.
        forward(0, 5),
        launch(1, 1),
        launch(6, 2),
        forward(10, 15),
        launch(11, 3, "cuda_driver"),
        launch(16, 4),
        kernel(20, 30, launch=1),
        kernel(30, 40, launch=2),
        kernel(47, 60, launch=3),
        kernel(60, 70, launch=4),
        kernel(0, 5, stream=9, launch=99),  # of a lane
    ]
    found = gaps_of(events, has_kernels=True)
    assert found.forward_start_us == [7.0], "the very first kernel has none before it"
    assert found.kernels == 4
    assert found.idle_part == pytest.approx(7 / 50)
    assert launch(1, 1) not in kept_events(events)
    assert kernel(20, 30, launch=1) in kept_events(events)
    with pytest.raises(ValueError, match="no range"):
        gaps_of(events[1:3], has_kernels=True)


def test_what_pytest_wrote(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(
        "<testsuites><testsuite><testcase classname='a' name='b'><failure message='it is 1'/></testcase>"
        "<testcase classname='a' name='c'/><testcase classname='a' name='d'><skipped/></testcase>"
        "</testsuite></testsuites>"
    )
    assert read_report(tmp_path / "report.xml") == CudaTests(
        passed=1, failed=1, skipped=1, failures=["a::b: it is 1"]
    )


WATCHED = """
import contextlib, threading, time
import torch
from pathlib import Path
from torch.utils._python_dispatch import TorchDispatchMode
from benchmarks.gpu.workers import watched
from benchmarks.gpu.workers.setting import Setting

seen = []

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        seen.append(str(op))
        return op(*args, **(kwargs or {}))

mode = Mode()
setting = Setting(device=torch.device("cpu"), is_quick=True, is_plain=False, until_s=time.monotonic() + 99,
                  folder=Path("."), write=print)
steps = watched._train(setting, lambda: mode)
attention = sum("scaled_dot_product" in op for op in seen)
print(steps, attention)
"""


@pytest.mark.rare
@pytest.mark.distributed
def test_a_checker_sees_the_operators_of_our_programs() -> None:
    """A mode around the whole step would make Dynamo run the model uncompiled."""
    ran = subprocess.run(
        [sys.executable, "-c", WATCHED],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    steps, attention = map(int, ran.stdout.split()[-2:])
    assert attention >= steps * QUICK.layers * 2, "forward and backward of each layer and step"


# --- everything -------------------------------------------------------------------------------------------


@pytest.mark.rare
@pytest.mark.distributed
def test_every_part_runs_on_a_cpu_or_says_why_not(tmp_path: Path) -> None:
    argv = ["--device", "cpu", "--quick", "--seconds", "1800", "--out", str(tmp_path)]
    folder = tmp_path / "benchmarks" / "gpu"
    code = main(argv)
    found = {part.name: read_outcome(folder / f"{part.name}.json") for part in PARTS}
    assert code == 0, [(o.part, o.printed) for o in found.values() if o.state is not Ending.DONE]
    not_run = {name for name, o in found.items() if o.state is Ending.NOT_RUN}
    # `streams` and `megatron-full` run if this machine has what they need.
    assert {"tests", "sanitizer"} <= not_run <= {"tests", "sanitizer", "streams", "megatron-full"}
    assert all(found[name].reason for name in not_run)
    text = (tmp_path / "gpu.md").read_text()
    assert "no finding" in text
    assert "WRONG" not in text
    trained = {name: o.found for name, o in found.items() if isinstance(o.found, Trained)}
    mine, theirs = trained["fcdp-full"], trained["fsdp2-full"]
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-2), "bf16, on one and the same group"
    for name in ("fcdp-full", "fcdp-lora"):
        held = trained[name]
        assert held.host_bytes >= held.parameter_bytes // held.ranks_per_node
        assert held.device_buckets == 0
        assert held.predicted_peak_bytes
        assert b"fcdp::load" in read_trace(folder / f"trace-{name}.json.gz")
    json.loads(read_trace(folder / "trace-fsdp2-full.json.gz"))


def read_trace(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())
