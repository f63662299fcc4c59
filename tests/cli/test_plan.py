"""`fcdp plan` and `fcdp simulate`: output, exit codes, and messages about bad input."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders_planner import make_profile
from fcdp_compile.cli import main
from fcdp_compile.cli.plan import add_job_arguments
from fcdp_compile.cluster.profile import write_profile
from tests.marks import quick

ROW = [
    "strategy",
    "fits",
    "peak_gpu_bytes",
    "offloads",
    "host_bytes_per_node",
    "inter_bytes_per_step",
    "step_s",
    "exposed_s",
    "samples_per_s",
    "max_batch_per_gpu",
]
CONFIG = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_embd": 48,
    "n_head": 4,
    "vocab_size": 199,
    "n_positions": 8,  # fewer than the planned sequence length
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MODELS = """
import torch
from torch import nn


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, values, scale):
        return (values @ self.weight * scale).sum()


class Peeks(Line):
    def forward(self, values, scale):
        if values.sum().item() > 0:
            values = values * 2
        return super().forward(values, scale)


def build(batch, seq):
    return Line(), {"values": torch.zeros(batch, 64), "scale": torch.zeros(batch, 1)}


def alone(batch, seq):
    return Line()


def short(batch, seq):
    return Line(), {"values": torch.zeros(batch, 64)}


def peeks(batch, seq):
    return Peeks(), {"values": torch.zeros(batch, 64), "scale": torch.zeros(batch, 1)}


def fails(batch, seq):
    raise RuntimeError("no such luck")


def takes_nothing():
    return None


def gives_nothing(batch, seq):
    return None
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with configurations, profiles and functions; traces are kept there."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "gpt.json").write_text(json.dumps(CONFIG))
    (folder / "vision.json").write_text('{"model_type": "vit"}')
    (folder / "typeless.json").write_text('{"n_layer": 2}')
    (folder / "damaged.json").write_text("{")
    (folder / "wrong.json").write_text('{"model_type": "gpt2", "n_embd": 50, "n_head": 4}')
    (folder / "planned_models.py").write_text(MODELS)
    profile = make_profile()
    write_profile(folder / "cluster.json", profile)
    write_profile(folder / "tiny.json", replace(profile, device_memory_bytes=1000))
    text = (folder / "cluster.json").read_text()
    (folder / "dead.json").write_text(text.replace("100000000.0", "0.0", 1))
    return folder


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in that folder: exit code, stdout, stderr."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("FCDP_CACHE", str(place / "kept"))

    def call(command: str, *arguments: str, **changes: str) -> tuple[int, str, str]:
        given = {"model": "planned_models:build", "cluster": "cluster.json", "nodes": "2"}
        given |= {"gpus-per-node": "2", "seq": "16"} | changes
        named = [part for name, value in given.items() for part in (f"--{name}", value)]
        try:
            code: object = main([command, *named, *arguments])
        except SystemExit as end:
            code = end.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return call


def _rows(text: str) -> dict[str, dict[str, Any]]:
    return {row["strategy"]: row for row in json.loads(text)["rows"]}


# Plans.


@pytest.mark.parametrize(
    "strategies", quick([[], ["--strategy", "zero3,fcdp"]], ["--strategy", "zero3,fcdp"])
)
def test_a_table(run: Run, strategies: list[str]) -> None:
    code, out, _ = run("plan", *strategies, model="gpt.json")
    assert code == 0
    assert out.startswith("2 x 2 ranks (N x g) of by hand, batch 1 a GPU; ")
    header, _, *rows = out.split("\n\n")[1].splitlines()
    assert header.split()[:2] == ["strategy", "fits"]
    assert {row.split()[0] for row in rows} >= {"zero3", "fcdp", *(() if strategies else ("ddp",))}
    assert out.rstrip().endswith(".")


def test_progress_where_a_person_looks(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = run("plan", "--strategy", "zero3,fcdp")
    told = [line.split(" s  ")[1] for line in err.splitlines()]
    assert code == 0
    assert told[:3] == [
        "building the model without weights",
        "tracing its forward",
        "tracing the backward of graph 1",
    ]
    assert told[-2:] == ["planning zero3 (1 of 2)", "planning fcdp (2 of 2)"]


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_help_tells_every_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split()).partition(" options: ")[2]
    parser = argparse.ArgumentParser()
    add_job_arguments(parser)
    for action in parser._actions[1:]:
        told = text.partition(f" {action.option_strings[0]} ")[2].partition(" --")[0]
        assert action.required or action.nargs == 0 or "default: " in told, action.dest


def test_json(run: Run, place: Path) -> None:
    """The trace of a configuration is kept: the second plan finds it."""
    code, out, _ = run("plan", "--format", "json", "--strategy", "zero3,fcdp", model="gpt.json")
    found = json.loads(out)
    assert code == 0
    assert list(found) == ["rows", "recommended", "why"]
    assert all(list(row) == ROW for row in found["rows"])
    assert sorted(row["strategy"] for row in found["rows"]) == ["fcdp", "zero3"]
    assert found["recommended"] in ("fcdp", "zero3")
    kept = {p: p.stat().st_mtime_ns for p in (place / "kept").iterdir()}
    again = run("plan", "--format", "json", "--strategy", "zero3,fcdp", model="gpt.json")
    assert again == (code, out, again[2])
    assert {p: p.stat().st_mtime_ns for p in (place / "kept").iterdir()} == kept


@pytest.mark.rare
def test_adapters_send_less(run: Run) -> None:
    arguments = ("--format", "json", "--strategy", "zero3,fcdp")
    trained = _rows(run("plan", *arguments, model="gpt.json")[1])
    code, out, err = run("plan", *arguments, "--lora", "4", model="gpt.json")
    assert (code, err) == (0, "")
    adapted = _rows(out)
    for name in ("zero3", "fcdp"):
        assert adapted[name]["inter_bytes_per_step"] < trained[name]["inter_bytes_per_step"]
    assert adapted["fcdp"]["inter_bytes_per_step"] < adapted["zero3"]["inter_bytes_per_step"] / 5


def test_micro_batches(run: Run) -> None:
    arguments = ("--format", "json", "--strategy", "zero3,fcdp")
    one, four = (_rows(run("plan", *arguments, "--accumulate", s)[1]) for s in ("1", "4"))
    sent = {n: (one[n]["inter_bytes_per_step"], four[n]["inter_bytes_per_step"]) for n in one}
    assert sent["zero3"][1] == 4 * sent["zero3"][0]
    assert sent["fcdp"][1] == sent["fcdp"][0], "one gather and one reduction"


def test_nothing_fits(run: Run) -> None:
    code, out, err = run("plan", cluster="tiny.json")
    assert (code, err) == (1, "")
    assert "nothing fits: " in out
    assert "use more nodes" in out
    code, out, _ = run("plan", "--format", "json", cluster="tiny.json")
    assert (code, json.loads(out)["recommended"]) == (1, None)


# Simulations.


def test_without_conditions_it_is_the_plan(run: Run) -> None:
    assert run("simulate", "--format", "json")[1] == run("plan", "--format", "json")[1]
    assert run("simulate")[1] == run("plan")[1]


def test_slow_nodes_cost_time(run: Run) -> None:
    arguments = ("--format", "json", "--strategy", "zero3")
    even = _rows(run("simulate", *arguments)[1])["zero3"]["step_s"]
    for more in (("--straggler", "1:50"), ("--slow-link", "1:0.5")):
        slow = _rows(run("simulate", *arguments, *more)[1])["zero3"]["step_s"]
        assert slow > even, more
    first, second = (
        run("simulate", *arguments, "--jitter", "0.5", "--seed", "7")[1] for _ in range(2)
    )
    assert first == second
    assert _rows(first)["zero3"]["step_s"] != even
    ring = _rows(run("simulate", *arguments, "--collectives", "ring")[1])["zero3"]
    assert ring["inter_bytes_per_step"] > 0


@pytest.mark.parametrize("sweep", ["nodes=2,4,8", "bandwidth=1G,10G,100G"])
def test_sweeps(run: Run, sweep: str, place: Path) -> None:
    of, _, values = sweep.partition("=")
    arguments = ("--strategy", "zero3,fcdp", "--sweep", sweep)
    code, out, err = run("simulate", *arguments)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == values.split(",")
    points = json.loads(run("simulate", *arguments, "--format", "json")[1])["sweep"]
    assert [p[of] for p in points] == values.split(",")
    assert all(list(p) == [of, "rows", "recommended", "why"] for p in points)
    rows = list(csv.DictReader(io.StringIO(run("simulate", *arguments, "--format", "csv")[1])))
    assert list(rows[0]) == [of, *ROW]
    expected = [(p[of], r["strategy"], r["step_s"]) for p in points for r in p["rows"]]
    assert [(r[of], r["strategy"], float(r["step_s"])) for r in rows] == expected
    for suffix, start in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        assert run("simulate", *arguments, "--plot", f"sweep{suffix}")[0] == 0
        assert (place / f"sweep{suffix}").read_bytes().startswith(start)


def test_one_row_as_csv(run: Run) -> None:
    out = run("simulate", "--format", "csv", "--strategy", "ddp")[1]
    (row,) = csv.DictReader(io.StringIO(out))
    assert list(row) == ROW


# Bad input.


@pytest.mark.parametrize(
    ("changes", "arguments", "expected"),
    [
        ({"model": "gpt-10"}, (), "unknown model 'gpt-10'"),
        ({"model": "gpt-10"}, (), "did you mean 'gpt-10b'?"),
        ({"model": "typeless.json"}, (), "typeless.json: model_type is missing"),
        ({"model": "damaged.json"}, (), "damaged.json: is not a JSON file"),
        ({"model": "absent.json"}, (), "absent.json: No such file or directory"),
        ({"model": "wrong.json"}, (), "wrong.json: "),
        ({"model": "vision.json"}, (), "no causal or masked language model of type 'vit'"),
        ({"model": "vision.json"}, (), "give a function your_module:build_fn"),
        ({"model": "planned_models:alone"}, (), "its forward takes values, scale; return a pair"),
        ({"model": "planned_models:short"}, (), "missing a required argument: 'scale'"),
        ({"model": "planned_models:peeks"}, (), "cannot be traced without data"),
        ({"model": "planned_models:fails"}, (), "failed (RuntimeError: no such luck)"),
        ({"model": "planned_models:takes_nothing"}, (), "cannot be called with a batch size"),
        ({"model": "planned_models:gives_nothing"}, (), "returned NoneType; return a pair"),
        ({"model": "planned_models:absent"}, (), "has no function 'absent'"),
        ({"model": "no_such_module:build"}, (), "cannot import 'no_such_module'"),
        ({"cluster": "a40x8-10gb"}, (), "did you mean 'a40x8-10gbe'?"),
        ({"cluster": "dead.json"}, (), "dead.json: machine.inter: is impossible: a link needs"),
        ({"gpus-per-node": "9"}, (), "9 ranks per node are more than the 8 of a node"),
        ({"nodes": "0"}, (), "'0' is not a whole number above 0"),
        ({"seq": "many"}, (), "'many' is not a whole number above 0"),
        ({}, ("--batch", "-1"), "'-1' is not a whole number above 0"),
        ({}, ("--strategy", "fcpd"), "unknown strategy 'fcpd'"),
        ({}, ("--strategy", "fcpd"), "did you mean 'fcdp'?"),
        ({}, ("--strategy", "zero3,fdcp"), "did you mean 'fcdp'?"),
        ({"nodes": "1"}, ("--strategy", "mics"), "there is one node; use 'zero3'"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_bad_jobs(
    run: Run, command: str, changes: dict[str, str], arguments: tuple[str, ...], expected: str
) -> None:
    _refused(run(command, *arguments, **changes), expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--sweep", "gpus=1,2"), "'gpus=1,2' is not a sweep; give nodes=2,4,8"),
        (("--sweep", "nodes="), "is not a sweep"),
        (("--sweep", "nodes=2,x"), "'x' is not a whole number above 0"),
        (("--sweep", "bandwidth=0"), "bandwidth "),
        (("--plot", "a.svg"), "--plot draws a sweep; give --sweep too"),
        (("--sweep", "nodes=2", "--plot", "a.pdf"), "must end in .svg or .png"),
        (("--sweep", "nodes=2", "--plot", "no/a.svg"), "there is no folder no"),
        (("--straggler", "3:2"), "the conditions are of 3 nodes, but there are 2"),
        (("--straggler", "1"), "'1' is not a number of nodes and a factor"),
        (("--straggler", "1:0"), "must be finite and above zero"),
        (("--slow-link", "0:0.5"), "must be at least 1"),
        (("--jitter", "-1"), "jitter is -1.0"),
        (("--seed", "-1"), "seed is -1"),
    ],
)
def test_bad_simulations(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    _refused(run("simulate", *arguments), expected)


def _refused(found: tuple[int, str, str], expected: str) -> None:
    code, out, err = found
    assert (code, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
