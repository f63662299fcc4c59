"""Presets are points of one space, found by name."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from fcdp_compile.core.params.spec import Home, fit_strategy
from fcdp_compile.core.sharding.refusals import warn_of_no_frozen
from fcdp_compile.strategy import PRESETS, Cache, GradientOn, Life, Scope, Strategy
from fcdp_compile.strategy.formats import Format


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_found_by_its_own_name(name: str) -> None:
    strategy = Strategy.parse(name)
    assert strategy.name == name
    assert Strategy.parse(strategy) is strategy


def test_presets_are_different_points() -> None:
    points = [(s.home, s.cache, s.life, s.gradient) for s in PRESETS.values()]
    assert len(set(points)) == len(points)


def test_only_a_cache_that_outlives_the_backward_is_resident() -> None:
    found = {n for n, s in PRESETS.items() if not s.is_resident}
    assert found == {"ddp", "mics", "paro-ini", "zero3", "zero++", "paro-gng", "paro-gig"}


def test_where_each_preset_keeps_node_shards() -> None:
    assert {name: s.cache for name, s in PRESETS.items()} == {
        **dict.fromkeys(("zero1", "zero2", "paro-nig", "paro-nni", "paro-nii"), Cache.GPU_FULL),
        **dict.fromkeys(("ddp", "mics", "paro-ini"), Cache.NONE),
        **dict.fromkeys(("zero3", "paro-gng", "paro-gig"), Cache.NONE),
        **dict.fromkeys(("zero++", "paro-ing", "paro-iig", "paro-igg"), Cache.GPU),
        "fcdp": Cache.ADAPTIVE,
    }


def test_where_gradients_accumulate() -> None:
    assert {name: s.gradient for name, s in PRESETS.items()} == {
        **dict.fromkeys(("ddp", "zero1", "paro-nni", "paro-ini"), Scope.NONE),
        **dict.fromkeys(("paro-ing", "paro-gng"), Scope.NONE),
        **dict.fromkeys(("fcdp", "mics", "paro-nii", "paro-nig"), Scope.INTRA),
        **dict.fromkeys(("paro-iig", "paro-gig"), Scope.INTRA),
        **dict.fromkeys(("zero2", "zero3", "zero++", "paro-igg"), Scope.GLOBAL),
    }
    for strategy in PRESETS.values():
        on = GradientOn.AUTO if strategy.keeps_on_host else GradientOn.GPU
        assert strategy.accumulates_on is (None if strategy.gradient is Scope.GLOBAL else on)


@pytest.mark.parametrize("name", [*PRESETS, "fcdp+c4", "fcdp+w8+g4+c8", "fcdp+matrix"])
def test_nothing_waits_in_the_memory_of_the_host_if_the_gpu_has_the_same(name: str) -> None:
    strategy = Strategy.parse(name)
    mesh = Home(nodes=2, ranks_per_node=2, node=0, place=0)
    fitted = fit_strategy(strategy, mesh, shares_memory=True)
    assert not fitted.uses_host
    assert fitted.is_resident == strategy.is_resident
    assert fitted.home is strategy.home


def test_gradients_that_do_not_accumulate_cannot_wait_on_the_host() -> None:
    with pytest.raises(ValueError, match="so none wait on the host"):
        replace(PRESETS["zero3"], gradient_on=GradientOn.HOST)
    assert PRESETS["fcdp"].with_gradients_on("host").accumulates_on is GradientOn.HOST
    with pytest.raises(ValueError, match="so none wait on the host"):
        PRESETS["zero2"].with_gradients_on("host")
    with pytest.raises(ValueError, match="gradient_on must be one of auto, gpu, host, not 'cpu'"):
        PRESETS["fcdp"].with_gradients_on("cpu")


@pytest.mark.parametrize("name", PRESETS)
def test_on_one_node_no_node_shard_stays_on_the_gpu_and_only_whole_gradients_wait(
    name: str,
) -> None:
    preset, strategy = PRESETS[name], PRESETS[name].on_one_node(2)
    keeps = preset.cache in (Cache.GPU_FULL, Cache.ADAPTIVE)
    assert (strategy.name, strategy.cache) == (name, preset.cache if keeps else Cache.NONE)
    assert strategy.is_resident == (keeps and preset.is_resident)
    assert preset.on_one_node(1).cache is Cache.NONE, "one rank has everything"
    assert strategy.home is (Scope.NONE if preset.home is Scope.NONE else Scope.GLOBAL)
    assert strategy.gradient is not Scope.INTRA
    assert (strategy.accumulates_on is None) == (preset.gradient is not Scope.NONE)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("fsdp", "zero3"),
        ("hpz", "zero++"),
        ("paro-ggg", "zero3"),
        ("paro-ngg", "zero2"),
        ("paro-nng", "zero1"),
        ("paro-iii", "mics"),
        ("PARO-III", "mics"),
        ("hsdp", "mics"),
        ("paro-nnn", "ddp"),
    ],
)
def test_other_names_of_a_preset(alias: str, name: str) -> None:
    assert Strategy.parse(alias) is PRESETS[name]


def test_the_codes_of_paro() -> None:
    """Of the 27 codes of three letters 14 are valid, each with its scopes; 13 are ruled out."""
    scopes = {"n": Scope.NONE, "i": Scope.INTRA, "g": Scope.GLOBAL}
    kept = {"n": Cache.GPU_FULL, "i": Cache.GPU, "g": Cache.NONE}
    valid, ruled_out = [], []
    for code in map("".join, itertools.product("nig", repeat=3)):
        try:
            found = Strategy.parse(f"paro-{code}")
        except ValueError as error:
            ruled_out.append(str(error))
            continue
        valid.append(code)
        parameters, gradients, states = code
        assert (found.home, found.gradient) == (scopes[states], scopes[gradients])
        assert found.cache is (Cache.NONE if parameters == states else kept[parameters])
    expected = "nnn nni nng nii nig ngg ini ing iii iig igg gng gig ggg"
    assert sorted(valid) == sorted(expected.split())
    assert len(ruled_out) == 13
    assert all("Principle 1 rules it out" in message for message in ruled_out)


def test_nothing_cached_is_not_resident() -> None:
    strategy = Strategy(
        name="none",
        home=Scope.GLOBAL,
        cache=Cache.NONE,
        life=Life.UNTIL_CHANGED,
        gradient=Scope.GLOBAL,
    )
    assert not strategy.is_resident


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FCDP", "fcdp"),
        ("fcpd", "fcdp"),
        ("fdcp", "fcdp"),
        ("fcdpp", "fcdp"),
        ("fdsp", "fsdp"),
        ("zeor3", "zero3"),
        ("zero33", "zero3"),
        ("zero+", "zero3"),
    ],
)
def test_an_unknown_name_lists_the_known_ones_and_the_nearest(name: str, meant: str) -> None:
    why = rf"choose one of ddp, zero1, zero2, .*; did you mean '{re.escape(meant)}'\?"
    with pytest.raises(ValueError, match=why):
        Strategy.parse(name)


@pytest.mark.parametrize(
    ("name", "printed", "weights", "gradients", "host", "frozen"),
    [
        ("fcdp+w8+g4", "fcdp+w8+g4", "int8", "int4", "full", "full"),
        ("fcdp+g4+w8", "fcdp+w8+g4", "int8", "int4", "full", "full"),
        ("fcdp+c8", "fcdp+c8", "int8", "full", "int8", "full"),
        ("fcdp+c4", "fcdp+c4", "full", "full", "full", "nf4"),
        ("fcdp+c4+c8", "fcdp+c8+c4", "int8", "full", "int8", "nf4"),
        ("hpz+w8", "zero+++w8", "int8", "full", "full", "full"),
        ("paro-iig+g8", "paro-iig+g8", "full", "int8", "full", "full"),
        ("fsdp+w8+w8", "zero3+w8", "int8", "full", "full", "full"),
    ],
)
def test_modifiers(
    name: str, printed: str, weights: str, gradients: str, host: str, frozen: str
) -> None:
    """Modifiers in any order; parsing the printed form gives the strategy again."""
    found = Strategy.parse(name)
    formats = [getattr(found, f"{of}_format") for of in ("weight", "gradient", "host", "frozen")]
    assert (found.name, *(f.value for f in formats)) == (
        *(printed, weights, gradients, host, frozen),
    )
    assert Strategy.parse(printed) == found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fcdp+w9", "unknown modifier 'w9'; choose from w8, delta, g8, g4, c8, c4, ho_ring"),
        ("fcdp+", "unknown modifier ''; choose from w8"),
        ("fcdp+g4+g8", "two modifiers for the same choice; give one of g8 and g4"),
        ("mics+ho_ring", "gathers nothing between nodes"),
        (
            "fcdp+ho-ring",
            "unknown modifier 'ho-ring'; choose from w8, delta, g8, g4, c8, c4, ho_ring, matrix, off",
        ),
        ("zero3+c8", "keeps no node shards on the host"),
        ("zero3+c4", "keeps no node shards on the host"),
        ("paro-iii+w8", "whole copies on every node"),
        ("ddp+g4", "whole copies on every node"),
        ("ddp+offload", "keeps all parameters on every rank"),
        ("paro-nin+w8", "Principle 1"),
        ("nothing+w8", "unknown strategy 'nothing.w8'; choose one of"),
    ],
)
def test_impossible_modifiers(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", "[?]")):
        Strategy.parse(name)


def test_impossible_formats() -> None:
    fcdp = PRESETS["fcdp"]
    for field, wrong in (("weight_format", Format.INT4), ("gradient_format", Format.NF4)):
        with pytest.raises(ValueError, match=f"has {field} {wrong.value}, which is not for these"):
            replace(fcdp, **{field: wrong})
    with pytest.raises(
        ValueError, match="on the host in format int8, but receives them in format full"
    ):
        replace(fcdp, host_format=Format.INT8)


@pytest.mark.parametrize(
    ("name", "trained", "warns"),
    [("fcdp+c4", [True, True], 1), ("fcdp+c4", [True, False], 0), ("fcdp+c8", [True], 0)],
)
def test_a_format_for_frozen_parameters_where_none_is_frozen(
    name: str, trained: list[bool], warns: int, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_no_frozen((Strategy.parse(name), requires_grad) for requires_grad in trained)
    assert (
        caplog.text.count("none of its parameters is frozen, so the format changes nothing")
        == warns
    )


def test_the_option_of_fsdp() -> None:
    assert Strategy.fsdp(True, 4) is PRESETS["zero3"]
    assert Strategy.fsdp(4, 4) is PRESETS["zero++"]
    kept = Strategy.fsdp(False, 4)
    assert (kept.cache, kept.life) == (Cache.GPU_FULL, Life.UNTIL_BACKWARD)
    assert Strategy.fsdp(1, 1) is PRESETS["zero++"], "one rank, not True"
    with pytest.raises(ValueError, match="reshard_after_forward=2 is not the 4 ranks of a node"):
        Strategy.fsdp(2, 4)
    with pytest.raises(TypeError, match="not str"):
        Strategy.fsdp("yes", 4)  # type: ignore[arg-type]


def test_a_name_near_nothing_gets_no_guess() -> None:
    with pytest.raises(ValueError, match="unknown strategy ''") as info:
        Strategy.parse("")
    assert "did you mean" not in str(info.value)


@pytest.mark.parametrize("name", [None, 3, b"fcdp", ["fcdp"]])
def test_what_is_no_name_is_a_type_error(name: object) -> None:
    with pytest.raises(TypeError, match=f"not {type(name).__name__}"):
        Strategy.parse(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"home": Scope.INTRA, "gradient": Scope.GLOBAL}, "Principle 1 rules it out"),
        ({"home": Scope.NONE, "gradient": Scope.INTRA}, "Principle 1 rules it out"),
        ({"home": Scope.INTRA, "cache": Cache.GPU}, "home shards of scope intra are just as large"),
        (
            {"home": Scope.INTRA, "cache": Cache.ADAPTIVE},
            "home shards of scope intra are just as large",
        ),
        (
            {"home": Scope.NONE, "cache": Cache.GPU_FULL},
            "home shards of scope none are just as large",
        ),
        ({"home": Scope.INTRA, "weight_format": Format.INT8}, "whole copies on every node"),
        ({"home": Scope.NONE, "gradient_format": Format.INT4}, "whole copies on every node"),
    ],
)
def test_points_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    point = {"cache": Cache.NONE, "life": Life.UNTIL_CHANGED, "gradient": Scope.NONE}
    with pytest.raises(ValueError, match=message):
        Strategy(name="x", **{**point, **fields})
