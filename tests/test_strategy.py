"""Presets are points of one space, found by name."""

from __future__ import annotations

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
    assert {name for name, s in PRESETS.items() if s.is_resident} == {"fcdp"}


def test_where_each_preset_keeps_node_shards() -> None:
    caches = {name: PRESETS[name].cache for name in ("zero3", "zero++", "fcdp")}
    assert caches == {"zero3": Cache.NONE, "zero++": Cache.GPU, "fcdp": Cache.ADAPTIVE}


def test_nothing_cached_is_not_resident() -> None:
    strategy = Strategy(
        name="none",
        home=Scope.GLOBAL,
        cache=Cache.NONE,
        life=Life.UNTIL_CHANGED,
        gradient=Scope.GLOBAL,
    )
    assert not strategy.is_resident


@pytest.mark.parametrize("name", ["FCDP", "fcpd", "zero2", "zero+"])
def test_an_unknown_name_lists_the_known_ones_and_the_nearest(name: str) -> None:
    with pytest.raises(ValueError, match=r"choose one of zero3, zero\+\+, fcdp; did you mean"):
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
