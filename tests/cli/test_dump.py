"""`fcdp dump`: its output for good folders, and its messages about bad ones."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pytest

from builders_plan import make_bucket, make_plan, with_buckets, with_placements
from commands import cells, refusal
from fcdp_compile.cli import main
from fcdp_compile.cli.stages import passes
from fcdp_compile.passes.pipeline import PASSES
from fcdp_compile.plan import Lane, Plan, Tier
from fcdp_compile.plan.json import from_json, to_json, write_plan
from fcdp_compile.plan.stages import OpChange, Stage, read_stages, write_stages


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dump of one graph, with a printed graph beside it."""
    write_plan(tmp_path / "graph-000.plan.json", make_plan())
    (tmp_path / "graph-000.forward.cold.txt").write_text("def forward(self): ...\n")
    return tmp_path


# Tables.


def test_sizes_are_those_of_each_buckets_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Home shards of mics are split over a node alone, and ddp's are whole parameters."""
    elements = 2**20 // 4
    shards = {"zero3": (2, 2), "mics": (1, 2), "ddp": (1, 1)}
    buckets = [
        make_bucket(
            i,
            [("w", (elements,))],
            nodes=nodes,
            ranks_per_node=g,
            dtype=("float32", 4),
            strategy=name,
        )
        for i, (name, (nodes, g)) in enumerate(shards.items())
    ]
    plan = with_buckets(make_plan(), *buckets, refresh=(), schedules=())
    write_plan(tmp_path / "graph-000.plan.json", plan)
    assert main(["dump", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert cells(out, "0")[2:5] == ["0.250", "0.500", "1.000"]
    assert cells(out, "1")[2:5] == ["0.500", "0.500", "1.000"]
    assert cells(out, "2")[2:5] == ["1.000", "1.000", "1.000"]
    assert cells(out, "total")[2:5] == ["1.750", "2.000", "3.000"]


def test_table_of_buckets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("graph-000: graph 0, strategy fcdp, 2 x 2 ranks (N x g), digest ")
    assert "layers.{0-7}.q_proj.weight  x8" in out
    assert "layers.{0-7}.q_proj.lora_A.weight  x8" in out
    assert "layers.3" not in out
    frozen, adapters = make_plan().buckets
    mib = [frozen.slot_bytes / 2**20, frozen.node_bytes / 2**20, frozen.full_bytes / 2**20]
    row = cells(out, "0")
    assert row[1:5] == ["8", *(f"{x:.3f}" for x in mib)]
    assert row[5:] == ["bfloat16", "float32", "yes", "fcdp", "host"]
    assert "\nbucket 0: frozen together; kept\n" in out
    total = (frozen.slot_bytes + adapters.slot_bytes) / 2**20
    assert cells(out, "total") == ["total", "24", *(f"{total * k:.3f}" for k in (1, 2, 4))]
    assert "refresh before a forward: 0\n" in out


def test_table_of_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["dump", str(folder)])
    out = capsys.readouterr().out
    plan = make_plan()
    # A variant is named only if a graph has two: the forward has, the backward has not.
    titles = ["forward cold", "forward warm", "backward"]
    assert [s.direction.value for s in plan.schedules] == [t.split()[0] for t in titles]
    starts = [out.index(f"\n{title}\n") for title in titles]
    assert starts == sorted(starts)
    for schedule, start, end in zip(plan.schedules, starts, [*starts[1:], len(out)], strict=True):
        part = out[start:end]
        for step in schedule.steps:
            row = cells(part, str(step.index))
            bucket = [] if step.bucket is None else [str(step.bucket)]
            waits = [str(w) for w in step.waits]
            expected = [step.kind.value, step.lane.value, *bucket, str(step.bytes), *waits]
            assert row[1 : 1 + len(expected)] == expected
        moved = sum(step.bytes for step in schedule.steps)
        assert cells(part, "total") == ["total", str(len(schedule.steps)), "steps", str(moved)]
        for lane in (Lane.INTER, Lane.INTRA, Lane.H2D, Lane.D2H):
            on_lane = [step.bytes for step in schedule.steps if step.lane is lane]
            assert cells(part, lane.value)[1:3] == [str(len(on_lane)), str(sum(on_lane))]


def test_numbers_stand_right_below_their_header(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["dump", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(lines) if "waits for" in line)
    end = lines[header].index("bytes") + len("bytes")
    steps = make_plan().schedules[0].steps
    for line, step in zip(lines[header + 2 :], steps, strict=False):
        assert line[:end].endswith(f" {step.bytes}")


def test_no_line_ends_in_spaces_and_the_text_is_plain(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["dump", str(folder)])
    out = capsys.readouterr().out
    assert all(line == line.rstrip() for line in out.splitlines())
    assert "\x1b" not in out
    assert out.isascii()


def test_graphs_are_printed_in_the_order_of_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stems = ["graph-002", "graph-999", "graph-1000"]
    stems += [f"model-{model}-graph-000" for model in (1, 2, 10)]
    for i in (1, 5, 2, 0, 4, 3):
        write_plan(tmp_path / f"{stems[i]}.plan.json", make_plan(graph=i, layers=1))
    main(["dump", str(tmp_path)])
    heads = [x for x in capsys.readouterr().out.splitlines() if ": graph " in x]
    assert [x.split(",")[0] for x in heads] == [f"{s}: graph {i}" for i, s in enumerate(stems)]


def test_a_plan_without_buckets_or_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan()
    bare = with_buckets(
        plan,
        refresh=(),
        schedules=(dataclasses.replace(plan.schedules[0], steps=()),),
    )
    write_plan(tmp_path / "graph-000.plan.json", bare)
    assert main(["dump", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "refresh before a forward: none" in out
    assert "0 steps" in out


def test_something_small_is_never_printed_as_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = with_buckets(make_plan(), make_bucket(0, [("bias", (3,))]), refresh=(), schedules=())
    write_plan(tmp_path / "graph-000.plan.json", plan)
    main(["dump", str(tmp_path)])
    assert cells(capsys.readouterr().out, "0")[2:5] == ["<0.001"] * 3


def test_names_cannot_break_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan()
    bucket = make_bucket(0, [("a\nb\x1b[31m", (4,))], why="x\ny")
    plan = dataclasses.replace(plan, buckets=(bucket, plan.buckets[1]), strategy="s\nt")
    write_plan(tmp_path / "graph-000.plan.json", plan)
    main(["dump", str(tmp_path)])
    out = capsys.readouterr().out
    assert r"a\nb\x1b[31m" in out
    assert r"x\ny" in out
    assert r"strategy s\nt," in out


# JSON.


def test_json_of_one_plan_is_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(folder), "--format", "json"]) == 0
    out = capsys.readouterr().out
    assert from_json(out, source="stdout") == make_plan()
    assert out == (folder / "graph-000.plan.json").read_text()


def test_json_of_several_plans_is_a_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans: list[Plan] = [make_plan(), make_plan(graph=1, layers=2)]
    write_plan(folder / "graph-001.plan.json", plans[1])
    main(["dump", str(folder), "--format=json"])
    items = json.loads(capsys.readouterr().out)
    assert [from_json(json.dumps(item), source="stdout") for item in items] == plans


# Passes and stages.


def test_the_passes_explain_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    """The command reads the text from the source; the test compares it with the value itself."""
    assert passes() == {one.__name__: inspect.getdoc(one) for one in PASSES}
    assert main(["dump", "--passes"]) == 0
    out = capsys.readouterr().out
    heads = [line for line in out.splitlines() if line[:1].isdigit()]
    assert heads == [f"{i}. {one.__name__}" for i, one in enumerate(PASSES, 1)]
    assert "Give every `unshard` its bucket." in out


def test_stages_are_listed_shown_and_compared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stage(name: str, graph: str, text: str, **changes: int) -> Stage:
        ops = tuple(OpChange(op=o, more=max(0, n), less=max(0, -n)) for o, n in changes.items())
        return Stage(name=name, graph=graph, time_s=0.0025, ops=ops, text=text)

    stages = (
        stage("partition", "forward", "a\nb"),
        stage("lower", "forward cold", "a\nc", unshard=-2, wait=3),
        stage("lower", "forward warm", "a\nd", w1=1, w2=1, w3=1, w4=1, w5=1),
        stage("segment", "forward cold", "a\nc"),
    )
    write_stages(folder / "graph-000.stages.json", stages)
    assert read_stages(folder / "graph-000.stages.json") == stages
    assert main(["dump", str(folder), "--stages"]) == 0
    out = capsys.readouterr().out
    assert cells(out, "partition") == ["partition", "forward", "2.500", "-"]
    assert cells(out, "lower")[1:] == ["forward", "cold", "2.500", "-2", "unshard,", "+3", "wait"]
    assert "+1 w4, and 1 more ops" in out
    assert main(["dump", str(folder), "--stage", "lower", "--variant", "warm"]) == 0
    assert capsys.readouterr().out == "# graph-000: forward warm after lower\n\na\nd\n"
    assert main(["dump", str(folder), "--stage-diff", "partition", "lower"]) == 1
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line[0] in "+-"] == [
        "--- graph-000: forward after partition",
        "+++ graph-000: forward cold after lower",
        "-b",
        "+c",
        "--- graph-000: forward after partition",
        "+++ graph-000: forward warm after lower",
        "-b",
        "+d",
    ]
    assert main(["dump", str(folder), "--stage-diff", "lower", "segment"]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert "there is no stage 'lowr'; " in (
        line := refusal(capsys, "dump", str(folder), "--stage=lowr")
    )
    assert "did you mean 'lower'?" in line
    assert "no stages of a graph 'backward'" in refusal(
        capsys, "dump", str(folder), "--stages", "--graph=backward"
    )


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "fcdp: no command given; choose one of dump"),
        (
            ("dmup", "x"),
            "choose one of dump, strategies, probe, plan, simulate, clean; did you mean 'dump'?",
        ),
        (("Dump",), "did you mean 'dump'?"),
        (("frobnicate",), "fcdp: unknown command 'frobnicate'; choose one of dump"),
        (("du\nmp",), r"unknown command 'du\nmp'"),
        (("dump",), "fcdp: dump needs FOLDER, the one given to the option dump"),
        (("dump", "x", "--format", "xml"), "invalid choice: 'xml'"),
        (("dump", "x", "--form", "json"), "unrecognized arguments: --form"),
        (("--verbose",), "fcdp: "),
    ],
)
def test_bad_usage(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refusal(capsys, *arguments)


def test_bad_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, file = tmp_path / "missing", tmp_path / "file.txt"
    file.touch()
    assert f"{missing}: does not exist; pass" in refusal(capsys, "dump", str(missing))
    assert f"{file}: is not a folder; pass" in refusal(capsys, "dump", str(file))
    assert "holds no graph-*.plan.json; compile" in refusal(capsys, "dump", str(tmp_path))
    assert "File name too long" in refusal(capsys, "dump", "x" * 5000)


@pytest.mark.parametrize("table_format", ["table", "json"])
def test_one_damaged_plan_stops_it_all(
    folder: Path, table_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "graph-001.plan.json"
    path.write_text(to_json(make_plan()).replace('"lane": "inter"', '"lane": "other"'))
    line = refusal(capsys, "dump", str(folder), "--format", table_format)
    assert line.startswith(f'fcdp: {path}: schedules[0].steps[0].lane: is "other", not')


def test_a_plan_that_is_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "graph-001.plan.json").mkdir()
    assert "is not a regular file" in refusal(capsys, "dump", str(folder))


def test_tables_fit_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines have at most 120 letters, with the names and reasons of models with adapters."""
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.default.weight"
    bucket = make_bucket(0, [(name.format(i), (8, 8)) for i in range(12)])
    bucket = dataclasses.replace(bucket, why="3 x 14 parameters that repeat; " * 9)
    plan = make_plan()
    buckets = (bucket, *plan.buckets[1:])
    step = plan.schedules[0].steps[-1]
    steps = (*plan.schedules[0].steps[:-1], dataclasses.replace(step, label="segment " * 20))
    schedules = (dataclasses.replace(plan.schedules[0], steps=steps), *plan.schedules[1:])
    plan = dataclasses.replace(plan, buckets=buckets, schedules=schedules)
    write_plan(tmp_path / "graph-000.plan.json", plan)
    assert main(["dump", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"\n  {name.format('{0-11}')}  x12\n" in out
    assert "bucket 0: 3 x 14 parameters that repeat" in out
    assert max(map(len, out.splitlines())) <= 120


# Choices.


def test_only_some_schedules(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(folder), "--graph", "forward", "--variant", "cold"]) == 0
    out = capsys.readouterr().out
    assert "inter_all_gather" in out
    assert "intra_reduce_scatter" not in out
    assert main(["dump", str(folder), "--graph", "inference"]) == 2
    error = capsys.readouterr().err
    assert "holds no schedule 'inference'; there is backward warm, forward cold, forward" in error


def test_why_a_bucket_is_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(folder), "--why", "1"]) == 0
    out = capsys.readouterr().out
    adapters = make_plan().buckets[1]
    assert "layers.{0-7}.q_proj.lora_A.weight  x8" in out
    assert f"{adapters.slot_bytes} bytes a rank" in out
    assert "all adapters" in out
    assert "tier: host; kept" in out
    assert "forward warm: not used" in out
    assert "step 0 of 8: inter_all_gather, forward cold" in out
    assert main(["dump", str(folder), "--why", "7"]) == 2
    assert "there is no bucket 7; the buckets are 0-1" in capsys.readouterr().err


def test_what_two_compilations_differ_in(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path_factory.mktemp("other")
    plan = make_plan()
    write_plan(other / "graph-000.plan.json", plan)
    assert main(["dump", str(folder), "--diff", str(other)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    changed = dataclasses.replace(plan, nodes=2, refresh=())
    changed = with_placements(changed, bucket=0, tier=Tier.GPU, why="there is room")
    write_plan(other / "graph-000.plan.json", changed)
    write_plan(other / "graph-001.plan.json", plan)
    assert main(["dump", str(folder), "--diff", str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"only {other} has graph-001.plan.json"
    assert any("refresh of bucket 0" in line for line in lines)
    assert any("bucket 0 tier" in line and "there is room" in line for line in lines)
