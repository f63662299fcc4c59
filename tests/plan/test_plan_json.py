"""Plans survive a file; anything else is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from builders_plan import LANE_OF, make_plan, plans
from documents import REMOVED, damaged
from documents import Path as Place
from fcdp_compile.errors import PlanFormatError
from fcdp_compile.plan import SCHEMA, Bucket, BucketParam, Kind, Plan, Schedule, Step
from fcdp_compile.plan.json import from_json, read_plan, to_json, write_plan

PLAN = make_plan(layers=2)
DOCUMENT: dict[str, Any] = json.loads(to_json(PLAN))


def places(value: object, path: Place = ()) -> Iterator[Place]:
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from places(item, (*path, i))


def refusal(text: str) -> str:
    """The message of the refusal of a text."""
    with pytest.raises(PlanFormatError) as info:
        from_json(text, source="x.json")
    message = str(info.value)
    assert message.startswith("x.json: ")
    assert message.isprintable()
    assert len(message) < 1000
    return message


def plan_or_refusal(read: Callable[[], Plan], source: str) -> Plan | None:
    """The plan that was read, or None after a proper refusal; other exceptions pass through."""
    try:
        return read()
    except PlanFormatError as error:
        message = str(error)
    assert message.startswith(f"{source}: ")
    assert message.isprintable()
    return None


PLACES = list(places(DOCUMENT))


@given(plans())
def test_round_trip(plan: Plan) -> None:
    text = to_json(plan)
    assert from_json(text, source="x.json") == plan
    assert to_json(from_json(text, source="x.json")) == text


def test_text_is_json_with_one_step_a_line() -> None:
    text = to_json(PLAN)
    assert json.loads(text)["schema"] == SCHEMA
    lines = [line for line in text.splitlines() if '"kind": ' in line]
    assert len(lines) == sum(len(s.steps) for s in PLAN.schedules)
    assert max(len(line) for line in text.splitlines()) < 200


def test_text_has_every_field_under_its_name() -> None:
    for cls, record in (
        (Plan, DOCUMENT),
        (Bucket, DOCUMENT["buckets"][0]),
        (BucketParam, DOCUMENT["buckets"][0]["params"][0]),
        (Schedule, DOCUMENT["schedules"][0]),
        (Step, DOCUMENT["schedules"][0]["steps"][0]),
    ):
        assert set(record) - {"schema"} == {f.name for f in dataclasses.fields(cls)}


def test_every_kind_has_its_lane() -> None:
    assert {kind: kind.lane for kind in Kind} == LANE_OF


FIRST_PARAM: Place = ("buckets", 0, "params", 0)
FIRST_STEP: Place = ("schedules", 0, "steps", 0)

FAULTS: list[tuple[Place, object, str]] = [
    # types
    ((), [], "is a list, not the JSON object of a plan"),
    ((), None, "is null, not the JSON object of a plan"),
    (("nodes",), 2.0, "nodes: is 2.0, not a whole number"),
    (("nodes",), True, "nodes: is true, not a whole number"),
    (("nodes",), "2", 'nodes: is "2", not a whole number'),
    (("nodes",), None, "nodes: is null, not a whole number"),
    (("nodes",), float("nan"), "nodes: is NaN, not a whole number"),
    (("nodes",), float("inf"), "nodes: is Infinity, not a whole number"),
    (("strategy",), 3, "strategy: is 3, not a string"),
    (("buckets",), {}, "buckets: is an object, not a list"),
    (("buckets", 1), [], "buckets[1]: is a list, not an object"),
    (("buckets", 0, "frozen"), 1, "buckets[0].frozen: is 1, not true or false"),
    (("refresh",), 0, "refresh: is 0, not a list"),
    # enums
    (
        ("placements", 0, "tier"),
        "disk",
        'placements[0].tier: is "disk", not one of none, host, gpu, gpu-full',
    ),
    (("schedules", 0, "direction"), [], "schedules[0].direction: is a list, not one of forward"),
    ((*FIRST_STEP, "kind"), "gather", 'schedules[0].steps[0].kind: is "gather", not one of'),
    # fields
    (("schema",), REMOVED, "schema: is missing, so this is not a plan"),
    (("schema",), "fcdp.plan/1", f'is "fcdp.plan/1", but this version of fcdp reads "{SCHEMA}"'),
    (("graph",), REMOVED, "graph: is missing"),
    ((*FIRST_STEP, "label"), REMOVED, "schedules[0].steps[0].label: is missing"),
    (("extra",), 1, "extra: is not a field here; the fields are strategy, nodes"),
    (("two words",), 1, '["two words"]: is not a field here'),
    ((*FIRST_PARAM, "layout", "dims"), 0, "buckets[0].params[0].layout.dims: is not a field"),
    # ranges
    (("nodes",), -1, "nodes: is negative"),
    (("nodes",), 10**30, "nodes: is larger than 9223372036854775807"),
    (("nodes",), -(10**30), "nodes: is negative"),
    ((*FIRST_STEP, "bytes"), -5, "schedules[0].steps[0].bytes: is negative"),
    # layouts
    ((*FIRST_PARAM, "layout", "dim"), 2, "layout: is impossible: dimension 2 does not exist"),
    ((*FIRST_PARAM, "layout", "dim"), None, "layout: is impossible: dimension None does not exist"),
    ((*FIRST_PARAM, "layout", "nodes"), 0, "layout: is impossible: layout needs at least one rank"),
    # references
    (("placements",), [], "placements: are not those of the buckets, in their order"),
    (("placements", 0, "bucket"), 7, "placements: are not those of the buckets, in their order"),
    (("buckets", 0, "params"), [], "buckets[0].params: is empty"),
    (("schedules", 0, "memory_bytes"), [1], "schedules[0].memory_bytes: has not one entry"),
    ((*FIRST_STEP, "index"), 1, "schedules[0].steps[0]: waits for a step that is not before it"),
    ((*FIRST_STEP, "waits"), [2**62], "schedules[0].steps[0]: waits for a step that is not before"),
    (("schedules", 0, "steps", 1, "waits"), [1], "schedules[0].steps[1]: waits for a step"),
    ((*FIRST_STEP, "bucket"), 7, "schedules[0].steps[0].bucket: is 7, which is no bucket of the"),
    ((*FIRST_STEP, "bucket"), None, "schedules[0].steps[0].bucket: is None, which is no bucket"),
]


@pytest.mark.parametrize(("path", "value", "expected"), FAULTS)
def test_a_fault_is_told_with_its_field(path: Place, value: object, expected: str) -> None:
    assert expected in refusal(json.dumps(damaged(DOCUMENT, path, value)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is not JSON at line 1 column 1"),
        ("\ufeff{}", "is not JSON"),
        ("{", "is not JSON"),
        ("\x00", "is not JSON"),
        ("{}", "schema: is missing"),
        (json.dumps({"schema": SCHEMA}), "strategy: is missing"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"a":' * 100_000, "is nested too deeply"),
        ("[" * 500 + "]" * 500, "is a list, not the JSON object"),
        ('{"schema": ' + "[" * 500 + "]" * 500 + "}", "schema: is a list"),
        ('{"schema": "fcdp.plan/7", "schema": "fcdp.plan/7"}', "schema: appears twice"),
        ('{"schema": {"a": 1, "a": 2}}', "schema: is an object"),
    ],
)
def test_a_text_that_is_no_plan_is_refused(text: str, expected: str) -> None:
    assert expected in refusal(text)


def test_a_repeated_field_is_told_with_its_path() -> None:
    text = json.dumps(DOCUMENT).replace('"tier":', '"tier": "gpu", "tier":', 1)
    assert "placements[0].tier: appears twice" in refusal(text)


@pytest.mark.parametrize("digits", ["9" * 30, "9" * 10_000, "-" + "9" * 10_000])
def test_a_huge_number_is_refused_with_its_field(digits: str) -> None:
    text = json.dumps(DOCUMENT).replace('"graph": 0', f'"graph": {digits}')
    assert "x.json: graph: is " in refusal(text)


def test_half_a_surrogate_pair_is_refused() -> None:
    assert "strategy: contains half" in refusal(
        json.dumps(damaged(DOCUMENT, ("strategy",), "a\ud800"))
    )


def test_a_hostile_field_name_stays_on_one_line() -> None:
    refusal(json.dumps(damaged(DOCUMENT, ("a\nb\x1b[31m" + "c" * 5000,), 1)))


def test_a_name_with_line_breaks_survives_and_the_source_is_escaped() -> None:
    plan = dataclasses.replace(PLAN, strategy="a\nb")
    assert from_json(to_json(plan), source="x.json") == plan
    with pytest.raises(PlanFormatError) as info:
        from_json("", source="a\nb\udcff")
    assert str(info.value).startswith(r"a\nb\udcff: ")


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-1, 3),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["compute", "wait", "h2d", "gpu", "forward", "warm", "float32", SCHEMA]),
        st.just(REMOVED),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=300)
@given(st.sampled_from(PLACES), json_values)
def test_any_value_anywhere_is_either_legal_or_refused(path: Place, value: object) -> None:
    text = json.dumps(damaged(DOCUMENT, path, value), default=lambda removed: None)
    plan = plan_or_refusal(lambda: from_json(text, source="x.json"), "x.json")
    if plan is not None:
        assert from_json(to_json(plan), source="x.json") == plan
        assert json.loads(to_json(plan)) == json.loads(text)


@settings(max_examples=300)
@given(st.data())
def test_any_damage_to_the_bytes_is_either_legal_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = to_json(PLAN).encode()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 20)) | st.just(len(whole)))
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(whole[:start] + data.draw(st.binary(max_size=4)) + whole[end:])
    plan = plan_or_refusal(lambda: read_plan(path), str(path))
    if plan is not None:
        assert from_json(to_json(plan), source="x.json") == plan


@settings(max_examples=300)
@given(st.text() | st.binary().map(lambda b: b.decode("latin-1")))
def test_any_text_is_refused(text: str) -> None:
    refusal(text)


def test_write_then_read(tmp_path: Path) -> None:
    path = tmp_path / "graph-000.plan.json"
    write_plan(path, PLAN)
    assert read_plan(path) == PLAN
    write_plan(str(path), dataclasses.replace(PLAN, graph=3))
    assert read_plan(str(path)).graph == 3
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "graph-000.plan.json"
    write_plan(path, PLAN)
    unwritable: Any = dataclasses.replace(PLAN, strategy=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_plan(path, unwritable)
    assert read_plan(path) == PLAN
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_opened_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_plan(tmp_path / "missing.json")
    with pytest.raises(FileNotFoundError):
        write_plan(tmp_path / "missing" / "x.json", PLAN)


def test_what_is_no_regular_file_is_refused_unopened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(PlanFormatError, match="is not a regular file"):
            read_plan(path)


def test_other_encodings_and_pickles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for data in (to_json(PLAN).encode("utf-16"), pickle.dumps(PLAN)):
        path.write_bytes(data)
        with pytest.raises(PlanFormatError, match=r"is not UTF-8 text at byte \d+; "):
            read_plan(path)


def test_a_file_larger_than_any_plan_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(PlanFormatError, match="larger than any plan"):
        read_plan(path)
