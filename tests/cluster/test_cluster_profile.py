"""Cluster profiles survive a file; a bad profile is refused with the name of the bad field."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from documents import REMOVED, damaged
from documents import Path as Place
from fcdp_compile.cluster.profile import (
    CLUSTERS,
    FORMAT,
    SCHEMA,
    ClusterProfile,
    Measured,
    Sample,
    find_profile,
    profile_to_json,
    read_profile,
    write_profile,
)
from fcdp_compile.errors import FcdpError, ProfileError
from fcdp_compile.plan.cost import Link, Machine

above_zero = st.floats(1e-12, 1e15)
links = st.builds(Link, latency_s=st.floats(0, 10), bytes_per_s=above_zero)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
counts = st.integers(1, 2**63 - 1)


@st.composite
def profiles(draw: st.DrawFn) -> ClusterProfile:
    ranks_per_node = draw(st.integers(1, 1024))
    sample = st.builds(
        Sample,
        of=st.sampled_from(Measured),
        bytes=st.integers(0, 2**63 - 1),
        flops=st.integers(0, 2**63 - 1),
        seconds=above_zero,
    )
    return ClusterProfile(
        name=draw(texts),
        device_type=draw(st.sampled_from(["cuda", "cpu"])),
        nodes=draw(st.none() | counts),
        ranks_per_node=ranks_per_node,
        device_memory_bytes=draw(counts),
        host_memory_bytes=draw(counts),
        ranks_per_host_link=draw(st.integers(1, ranks_per_node)),
        intra_over_host_link=draw(st.booleans()),
        machine=Machine(
            inter=draw(links),
            intra=draw(links),
            h2d=draw(links),
            d2h=draw(links),
            flops_per_s=draw(above_zero),
            memory_bytes_per_s=draw(above_zero),
        ),
        source=draw(texts),
        samples=tuple(draw(st.lists(sample, max_size=3))),
    )


PROFILE = dataclasses.replace(
    CLUSTERS["a40x8-10gbe"],
    nodes=2,
    samples=(Sample(of=Measured.H2D, bytes=4096, flops=0, seconds=1e-5),),
)
DOCUMENT: dict[str, Any] = json.loads(profile_to_json(PROFILE))


def refusal(text: str) -> str:
    with pytest.raises(ProfileError) as info:
        FORMAT.from_json(text, source="x.json")
    message = str(info.value)
    assert message.startswith("x.json: ")
    assert message.endswith("; measure again with fcdp probe, or correct the field")
    assert message.isprintable()
    return message


@given(profiles())
def test_round_trip(profile: ClusterProfile) -> None:
    text = profile_to_json(profile)
    assert FORMAT.from_json(text, source="x.json") == profile
    assert profile_to_json(FORMAT.from_json(text, source="x.json")) == text


_LATER = {"shares_memory"}
"""Written only where it is not the default."""


def test_text_has_every_field_under_its_name() -> None:
    for cls, record in (
        (ClusterProfile, DOCUMENT),
        (Machine, DOCUMENT["machine"]),
        (Link, DOCUMENT["machine"]["inter"]),
        (Sample, DOCUMENT["samples"][0]),
    ):
        assert set(record) - {"schema"} == {f.name for f in dataclasses.fields(cls)} - _LATER


FIELDS = [
    *[(f.name,) for f in dataclasses.fields(ClusterProfile) if f.name not in _LATER],
    *[("machine", f.name) for f in dataclasses.fields(Machine)],
    *[("machine", "h2d", f.name) for f in dataclasses.fields(Link)],
]


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
def test_a_missing_field_is_named(path: tuple[str, ...]) -> None:
    assert f"x.json: {'.'.join(path)}: is missing" in refusal(
        json.dumps(damaged(DOCUMENT, path, REMOVED))
    )


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ((), [], "is a list, not the JSON object of a cluster profile"),
        (("schema",), "fcdp.plan/5", f'but this version of fcdp reads "{SCHEMA}"'),
        (("schema",), REMOVED, "schema: is missing, so this is not a cluster profile"),
        (("extra",), 1, "extra: is not a field here; the fields are name, device_type"),
        (("name",), "", "name: is empty"),
        (("name",), 3, "name: is 3, not a string"),
        (("device_type",), "a tpu", "device_type: is 'a tpu', not a device type of torch"),
        (("nodes",), 0, "nodes: is 0, but must be at least 1"),
        (("nodes",), -1, "nodes: is negative"),
        (("ranks_per_node",), 0, "ranks_per_node: is 0, not 1 to 1024"),
        (("ranks_per_node",), 2000, "ranks_per_node: is 2000, not 1 to 1024"),
        (("ranks_per_node",), 8.0, "ranks_per_node: is 8.0, not a whole number"),
        (
            ("ranks_per_host_link",),
            0,
            "ranks_per_host_link: is 0, but must be 1 to 8, the ranks of a node",
        ),
        (
            ("ranks_per_host_link",),
            9,
            "ranks_per_host_link: is 9, but must be 1 to 8, the ranks of a node",
        ),
        (("intra_over_host_link",), 1, "intra_over_host_link: is 1, not true or false"),
        (("device_memory_bytes",), 0, "device_memory_bytes: is 0"),
        (("host_memory_bytes",), 0, "host_memory_bytes: is 0"),
        (("host_memory_bytes",), 10**30, "host_memory_bytes: is larger than 9223372036854775807"),
        (("machine",), None, "machine: is null, not an object"),
        (("machine", "inter"), 125e6, "machine.inter: is 125000000.0, not an object"),
        (("machine", "inter", "bytes_per_s"), 0, "machine.inter: is impossible: a link needs"),
        (("machine", "intra", "bytes_per_s"), -1.0, "machine.intra: is impossible: a link needs"),
        (("machine", "h2d", "latency_s"), -1e-6, "machine.h2d: is impossible: a link needs"),
        (("machine", "d2h", "bytes_per_s"), "fast", 'd2h.bytes_per_s: is "fast", not a number'),
        (("machine", "d2h", "bytes_per_s"), float("inf"), "d2h.bytes_per_s: is inf, which is not"),
        (("machine", "d2h", "latency_s"), float("nan"), "d2h.latency_s: is nan, which is not"),
        (("machine", "flops_per_s"), 0, "machine: is impossible: machine's 'flops_per_s' must be"),
        (("machine", "memory_bytes_per_s"), 0, "machine's 'memory_bytes_per_s' must be above zero"),
        (("samples",), {}, "samples: is an object, not a list"),
        (("samples", 0, "of"), "disk", 'samples[0].of: is "disk", not one of inter_all_gather'),
        (("samples", 0, "seconds"), 0, "samples[0].seconds: is 0.0, but must be above 0"),
        (("samples", 0, "bytes"), -1, "samples[0].bytes: is negative"),
        (("samples", 0, "flops"), REMOVED, "samples[0].flops: is missing"),
    ],
)
def test_a_fault_is_told_with_its_field(path: Place, value: object, expected: str) -> None:
    assert expected in refusal(json.dumps(damaged(DOCUMENT, path, value)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=300)
@given(st.sampled_from([*FIELDS, ("samples", 0), ("samples", 0, "seconds")]), json_values)
def test_any_value_anywhere_is_either_legal_or_refused(path: Place, value: object) -> None:
    text = json.dumps(damaged(DOCUMENT, path, value))
    try:
        profile = FORMAT.from_json(text, source="x.json")
    except ProfileError:
        refusal(text)
        return
    assert FORMAT.from_json(profile_to_json(profile), source="x.json") == profile


def test_write_then_find(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    write_profile(path, CLUSTERS["a40x8-1gbe"])
    write_profile(path, PROFILE)
    assert find_profile(str(path)) == read_profile(path) == PROFILE
    assert list(tmp_path.iterdir()) == [path]


def test_the_measured_profile_is_valid() -> None:
    path = Path(__file__).parents[2] / "docs" / "benchmarks" / "cluster-2x2-1gbit.json"
    profile = find_profile(str(path))
    assert (profile.name, profile.nodes, profile.ranks_per_node) == ("simulated-2x2-1gbit", 2, 2)
    assert {s.of for s in profile.samples} == set(Measured)


def test_built_in_profiles_are_valid_and_found_by_name() -> None:
    for name, profile in CLUSTERS.items():
        assert find_profile(name) == profile
        assert FORMAT.from_json(profile_to_json(profile), source=name) == profile


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a40x8-10gb", "did you mean 'a40x8-10gbe'?"), ("mine", "give a file that fcdp probe wrote")],
)
def test_an_unknown_name_is_told(name: str, expected: str) -> None:
    with pytest.raises(FcdpError, match="unknown cluster") as info:
        find_profile(name)
    assert expected in str(info.value)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        find_profile(str(tmp_path / "cluster.json"))


def test_ranks_at_one_link_share_it() -> None:
    profile = dataclasses.replace(PROFILE, ranks_per_host_link=4)
    machine, mine = profile.machine, profile.rank_machine
    for whole, part in ((machine.h2d, mine.h2d), (machine.d2h, mine.d2h)):
        assert part == Link(latency_s=whole.latency_s, bytes_per_s=whole.bytes_per_s / 4)
    assert dataclasses.replace(mine, h2d=machine.h2d, d2h=machine.d2h) == machine
    assert PROFILE.rank_machine == PROFILE.machine
