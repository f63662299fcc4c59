"""Costs in symbols: equal to the arithmetic of the byte tests, and to the papers."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import sympy

from fcdp_compile.cli import main
from fcdp_compile.strategy import PRESETS, Strategy
from fcdp_compile.strategy.formulas import F, N, T, a, b, costs, d, g, s
from tests.formulas import Model, training_step

SHAPES = {"frozen": (48, 8), "trained": (96, 4)}  # no padding at any of the sizes below


def cost(name: str) -> dict[str, sympy.Expr]:
    found = costs(Strategy.parse(name))
    return {field: getattr(found, field) for field in found.__slots__}


@pytest.mark.parametrize("name", [*PRESETS, "zero3+ho_ring", "fcdp+ho_ring"])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (4, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("is_lora", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_they_are_what_the_tests_of_bytes_count(
    name: str, nodes: int, ranks_per_node: int, is_lora: bool, micro_batches: int
) -> None:
    trained = {"trained"} if is_lora else set(SHAPES)
    model = Model(
        shapes=SHAPES,
        trainable=frozenset(trained),
        backward=frozenset(SHAPES),
        buckets=[(n,) for n in SHAPES],
    )
    sizes = {n: 4 * rows * columns for n, (rows, columns) in SHAPES.items()}
    values = {
        N: nodes,
        g: ranks_per_node,
        s: micro_batches,
        a: 1,
        F: sum(size for n, size in sizes.items() if n not in trained),
        T: sum(sizes[n] for n in trained),
    }
    symbolic = {field: e.subs(values) for field, e in cost(name).items()}
    first, later = (
        training_step(
            model,
            name,
            nodes,
            ranks_per_node,
            first=is_first,
            micro_batches=micro_batches,
            gradients_on_host=name.startswith("fcdp"),
        ).bytes
        for is_first in (True, False)
    )

    def sent(moved: Mapping[str, int], link: str) -> int:
        """Bytes that all ranks of a node send."""
        return ranks_per_node * sum(n for kind, n in moved.items() if kind.startswith(link))

    assert symbolic["inter"] == sent(later, "inter")
    assert symbolic["intra"] * ranks_per_node == sent(later, "intra")
    bus = ("store", "load", "accumulate", "collect")
    assert symbolic["bus"] == sum(later.get(kind, 0) for kind in bus)
    assert symbolic["first_inter"] == sent(first, "inter") - sent(later, "inter")
    assert symbolic["first_intra"] * ranks_per_node == sent(first, "intra") - sent(later, "intra")


def test_full_fine_tuning_as_the_papers_count_it() -> None:
    """In units of W (N - 1)/N between nodes: FCDP table I, ZeRO++ section 3.2."""
    unit = {F: 0}
    per_step = {name: cost(name)["inter"].subs(unit) / (T * (N - 1) / N) for name in PRESETS}
    assert sympy.simplify(per_step["zero3"] - 3 * s) == 0
    assert sympy.simplify(per_step["zero++"] - 2 * s) == 0
    for resident in ("zero2", "paro-igg"):
        assert sympy.simplify(per_step[resident] - (1 + s)) == 0
    for accumulating in ("fcdp", "zero1", "paro-iig"):
        assert per_step[accumulating] == 2, "a gather and a reduction, whatever s"


def test_differences_from_copies() -> None:
    """As bytes without them, times d; in the first step there is no copy."""
    full, delta = cost("fcdp"), cost("fcdp+delta")
    sent = T * (N - 1) / N
    assert sympy.simplify(full["inter"] - delta["inter"] - (1 - d) * sent) == 0
    assert sympy.simplify(delta["first_inter"] - full["first_inter"] - (1 - d) * sent) == 0
    assert sympy.simplify(delta["bus"] - full["bus"] - T / g - T / (N * g)) == 0
    assert cost("zero2+delta")["bus"] == 0
    at_1e_5 = (delta["inter"] / T).subs({d: sympy.Rational(137, 1600)})
    assert sympy.simplify(at_1e_5 - sympy.Rational(1737, 1600) * (N - 1) / N) == 0
    assert {n: v for n, v in delta.items() if n not in ("inter", "first_inter", "bus")} == {
        n: v for n, v in full.items() if n not in ("inter", "first_inter", "bus")
    }


def test_frozen_weights_cross_once() -> None:
    for resident in ("fcdp", "zero2", "paro-igg"):
        assert F not in cost(resident)["inter"].free_symbols
        assert sympy.simplify(cost(resident)["first_inter"] - F * (N - 1) / N) == 0
    assert F in cost("zero3")["inter"].free_symbols
    assert F in cost("zero++")["inter"].free_symbols


def test_quantised_with_accumulation_against_zero3() -> None:
    """8 micro-batches in bf16 with int8 weights and int4 gradients: at most 1/30 between nodes."""
    values = {F: 0, s: 8, b: 2}
    part = (cost("fcdp+w8+g4")["inter"] / cost("zero3")["inter"]).subs(values)
    assert sympy.simplify(part - sympy.Rational(99, 128) / 24) == 0
    assert sympy.simplify(part) <= sympy.Rational(1, 30)


@pytest.mark.parametrize(("name", "bytes_each"), [("fcdp+c8", "65/64"), ("fcdp+c4", "17/32")])
def test_frozen_weights_in_fewer_bits(name: str, bytes_each: str) -> None:
    quantised, full = cost(name), cost("fcdp")
    part = sympy.Rational(bytes_each) / b
    assert sympy.simplify(quantised["first_inter"] - full["first_inter"] * part) == 0
    no_gradients = {T: 0}
    assert sympy.simplify((quantised["host"] - full["host"] * part).subs(no_gradients)) == 0
    assert sympy.simplify((quantised["bus"] - full["bus"] * part).subs(no_gradients)) == 0
    assert quantised["gpu"].has(F), "home shards stay: what is on the host is not exact"


def test_trained_weights_are_not_in_nf4() -> None:
    quantised, full = cost("fcdp+c4"), cost("fcdp")
    for of in ("inter", "intra", "bus", "gradients", "host"):
        assert sympy.simplify((quantised[of] - full[of]).subs({F: 0})) == 0, of


def test_memory() -> None:
    W = F + T
    assert sympy.simplify(cost("zero3")["gpu"] - W / (N * g)) == 0
    assert sympy.simplify(cost("zero2")["gpu"] - W / (N * g) - W) == 0
    assert sympy.simplify(cost("paro-igg")["gpu"] - W / (N * g) - W / g) == 0
    assert sympy.simplify(cost("fcdp")["gpu"] - T / (N * g)) == 0, "below ZeRO-3's by F/G"
    assert cost("fcdp")["gradients"] == cost("zero3")["gradients"] == T / (N * g)
    assert sympy.simplify(cost("zero1")["gradients"] - a * T - T / (N * g)) == 0
    assert sympy.simplify(cost("fcdp")["host"] - W - a * T) == 0
    assert {n: cost(n)["host"] for n in PRESETS if n != "fcdp"} == dict.fromkeys(
        (n for n in PRESETS if n != "fcdp"), 0
    )


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies"]) == 0
    out = capsys.readouterr().out
    for name in (*PRESETS, "fsdp", "hpz", "paro-ngg"):
        assert name in out
    assert "(F + T)" not in out
    assert main(["strategies", "--formulas"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in PRESETS)
    assert "2*s*(F + T)/g" in out


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "--format", "json"]) == 0
    found = {r["name"]: r for r in json.loads(capsys.readouterr().out)}
    assert set(found) == set(PRESETS)
    assert found["zero++"]["aliases"] == ["hpz"]
    assert found["zero2"]["cache"] == "gpu-full"
    expected = cost("fcdp")["inter"]
    names = {str(symbol): symbol for symbol in (N, g, s, F, T)}
    assert sympy.simplify(sympy.sympify(found["fcdp"]["bytes"]["inter"], names) - expected) == 0


def test_chosen_ones_with_modifiers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "fcdp+w8+g4", "zero3+ho_ring", "--format", "json"]) == 0
    found = [r["name"] for r in json.loads(capsys.readouterr().out)]
    assert found == ["fcdp+w8+g4", "zero3+ho_ring"]
    with pytest.raises(SystemExit) as info:
        main(["strategies", "fcdp+w9"])
    assert info.value.code == 2
    error = capsys.readouterr().err
    assert "unknown modifier 'w9'" in error
    assert error.count("\n") == 1
