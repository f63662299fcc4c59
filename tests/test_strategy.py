"""Presets are points of one space, found by name."""

from __future__ import annotations

import itertools

import pytest

from fcdp_compile.strategy import PRESETS, Cache, Life, Scope, Strategy


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_found_by_its_own_name(name: str) -> None:
    strategy = Strategy.parse(name)
    assert strategy.name == name
    assert Strategy.parse(strategy) is strategy


def test_presets_are_different_points() -> None:
    points = [(s.home, s.cache, s.life, s.gradient) for s in PRESETS.values()]
    assert len(set(points)) == len(points)


def test_only_a_cache_that_outlives_the_backward_is_resident() -> None:
    assert {n for n, s in PRESETS.items() if s.is_resident} == {"zero2", "paro-igg", "fcdp"}


def test_where_each_preset_keeps_node_shards() -> None:
    assert {name: s.cache for name, s in PRESETS.items()} == {
        "zero2": Cache.GPU_FULL,
        "zero3": Cache.NONE,
        "zero++": Cache.GPU,
        "paro-igg": Cache.GPU,
        "fcdp": Cache.ADAPTIVE,
    }


@pytest.mark.parametrize(
    ("alias", "name"),
    [("fsdp", "zero3"), ("hpz", "zero++"), ("paro-ggg", "zero3"), ("paro-ngg", "zero2")],
)
def test_other_names_of_a_preset(alias: str, name: str) -> None:
    assert Strategy.parse(alias) is PRESETS[name]


def test_the_codes_of_paro() -> None:
    """27 of three letters: 13 are ruled out, and of the 14 others three are available."""
    found: dict[str, list[str]] = {"available": [], "valid": [], "invalid": []}
    for code in map("".join, itertools.product("nig", repeat=3)):
        try:
            Strategy.parse(f"paro-{code}")
            found["available"].append(code)
        except ValueError as error:
            found["invalid" if "Principle 1" in str(error) else "valid"].append(code)
    assert found["available"] == ["ngg", "igg", "ggg"]
    valid = {*found["available"], *found["valid"]}
    expected = "nnn nni nng nii nig ngg ini ing iii iig igg gng gig ggg"
    assert sorted(valid) == sorted(expected.split())
    assert len(found["invalid"]) == 13


def test_nothing_cached_is_not_resident() -> None:
    strategy = Strategy(
        name="none",
        home=Scope.GLOBAL,
        cache=Cache.NONE,
        life=Life.UNTIL_CHANGED,
        gradient=Scope.GLOBAL,
    )
    assert not strategy.is_resident


@pytest.mark.parametrize("name", ["FCDP", "fcpd", "zero33", "zero+"])
def test_an_unknown_name_lists_the_known_ones_and_the_nearest(name: str) -> None:
    with pytest.raises(ValueError, match=r"choose one of zero2, zero3, zero\+\+, .*; did you mean"):
        Strategy.parse(name)


def test_a_name_near_nothing_gets_no_guess() -> None:
    with pytest.raises(ValueError, match="unknown strategy ''") as info:
        Strategy.parse("")
    assert "did you mean" not in str(info.value)


@pytest.mark.parametrize("name", [None, 3, b"fcdp", ["fcdp"]])
def test_what_is_no_name_is_a_type_error(name: object) -> None:
    with pytest.raises(TypeError, match=f"not {type(name).__name__}"):
        Strategy.parse(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("home", "gradient"), [(Scope.INTRA, Scope.GLOBAL), (Scope.GLOBAL, Scope.NONE)]
)
def test_points_that_nothing_lowers_yet_are_refused(home: Scope, gradient: Scope) -> None:
    with pytest.raises(ValueError, match="use scope global for both"):
        Strategy(name="x", home=home, cache=Cache.NONE, life=Life.UNTIL_CHANGED, gradient=gradient)
