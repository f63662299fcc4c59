from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_overlap import main
from benchmarks.gpu_parts import Copies, Fsdp2Peak, GpuRun, Parity, Steps, read_part, write_part
from benchmarks.gpu_report import write_gpu_report
from benchmarks.shape import QUICK
from builders_bench import make_record

COPIES = Copies(
    copied_bytes=2**30,
    pool_h2d_s=[0.05, 0.04, 0.09],
    plain_h2d_s=[0.05, 0.05, 0.05],
    pool_d2h_s=[0.1, 0.1, 0.1],
    plain_d2h_s=[0.05, 0.05, 0.05],
)
STEPS = Steps(
    shape=QUICK,
    dtype="bfloat16",
    ranks=2,
    frozen_bytes=10**9,
    host_bytes=2**30,
    cached_s=[1.02, 1.0, 1.5],
    resident_s=[1.0, 0.9, 1.1],
    cached_peak_bytes=2**29,
    has_trace=True,
)


def make_run(
    *, losses: tuple[float, ...] = (5.0, 4.0), traffic: int = 7, device: str = "Card"
) -> GpuRun:
    def parity(mode: str, count: int) -> Parity:
        return Parity(
            mode=mode,
            losses=list(losses),
            ddp_losses=[5.0, 4.0],
            traffic={"inter all_gather": count, "d2h store": 0},
        )

    return GpuRun(
        device=device,
        date="2026-01-02T03:04:05+00:00",
        machine=make_record().machine,
        copies=COPIES,
        steps=STEPS,
        fsdp2=Fsdp2Peak(peak_bytes=2**30),
        parity=[parity("lora", traffic)],
        cpu_parity=[parity("lora", 7)],
    )


def test_report_shows_rates_times_and_memory() -> None:
    page = write_gpu_report(make_run())
    assert page.startswith("# On one GPU\n")
    assert "Measured on 2026-01-02" in page
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in page.splitlines()]
    assert ["pool", "21.47", "10.74"] in lines
    assert ["ratio", "1.000", "0.500"] in lines
    assert ["cached in host memory", "1.0200 (1.0000 – 1.5000, n=3)"] in lines
    assert "Added time: +2.0 % (target: at most 3 %). In host memory: 1024 MiB a rank." in page
    assert "512 MiB; of FSDP2 with as many ranks: 1024 MiB (0.50 of it)" in page
    assert ["lora", "4.00000", "0.0e+00", "the same", "inter all_gather 7"] in lines


def test_report_says_what_is_wrong() -> None:
    assert "**WRONG**" in write_gpu_report(make_run(losses=(5.0, 4.1)))
    assert "**DIFFERENT**" in write_gpu_report(make_run(traffic=8))
    right = write_gpu_report(make_run())
    assert "WRONG" not in right
    assert "DIFFERENT" not in right


def test_a_trial_on_a_cpu_is_no_finding() -> None:
    assert write_gpu_report(make_run(device="cpu")).startswith("# A trial of the script on a CPU")


@pytest.mark.parametrize("part", [COPIES, STEPS])
def test_parts_survive_their_file(part: Copies | Steps, tmp_path: Path) -> None:
    write_part(tmp_path / "part.json", part)
    assert read_part(tmp_path / "part.json", type(part)) == part


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 1
    assert "there is no CUDA device" in capsys.readouterr().err
    assert "Not measured on a GPU yet." in (tmp_path / "gpu.md").read_text()
    (tmp_path / "gpu.md").write_text("found before")
    assert main(["--out", str(tmp_path)]) == 1
    assert (tmp_path / "gpu.md").read_text() == "found before"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.slow
def test_the_whole_script_runs_on_a_cpu(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "benchmarks" / "gpu.json").read_text())
    steps = found["steps"]
    assert steps["host_bytes"] >= steps["frozen_bytes"], "one rank a node keeps the whole model"
    assert steps["has_trace"]
    trace = gzip.decompress((tmp_path / "benchmarks" / "gpu-trace.json.gz").read_bytes())
    assert b"fcdp::load" in trace
    assert b"fcdp::intra_all_gather" not in trace, "there is one rank a node"
    assert found["fsdp2"]["peak_bytes"] > steps["frozen_bytes"] / 2
    assert steps["cached_peak_bytes"] > 0
    page = (tmp_path / "gpu.md").read_text()
    assert "no finding" in page
    assert "WRONG" not in page
    for parity in found["parity"]:
        assert parity["losses"][0] > parity["losses"][-1] or parity["mode"] == "lora"
        assert parity["traffic"]["inter all_gather"] > 0
