"""Our closed forms and the papers' expressions: equal, or different by a term that is named here.

The papers' expressions are written as printed, and compared with `costs`, which other tests compare with
plans and with counted bytes.  Our letters: N nodes of g ranks, G = N g; PaRO's are given in `PARO`.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import sympy

from fcdp_compile.strategy import Scope, Strategy
from fcdp_compile.strategy.formulas import F, N, T, a, b, costs, g, s

G = N * g
PSI, K = T, sympy.Symbol("K", positive=True)
"""PaRO counts elements, all of them trained; our T bytes stand for PaRO's Psi elements."""


class Sent(NamedTuple):
    """Sent by all GPUs together in a mini-batch, between nodes (daggers in PaRO's table 3) and within."""

    between: sympy.Expr
    within: sympy.Expr

    @property
    def total(self) -> sympy.Expr:
        return self.between + self.within


def ours(name: str) -> Sent:
    found = costs(Strategy.parse(name))
    return Sent(*(x.subs({F: 0}) for x in (N * found.inter, G * found.intra)))


def same(left: sympy.Expr, right: sympy.Expr) -> bool:
    return sympy.simplify(left - right) == 0


def in_paros_letters(groups: sympy.Expr, per_group: sympy.Expr) -> dict[str, sympy.Expr]:
    """PaRO's N is the number of all GPUs, M that of a group's GPUs, g the number of groups."""
    return {"N": groups * per_group, "M": per_group, "g": groups}


PARO = in_paros_letters(N, g)
_N, _M, _g = PARO["N"], PARO["M"], PARO["g"]

RING = Sent(_g * PSI / _N * (_N - 1), (_N - _g) * PSI / _N * (_N - 1))
"""A ring over all GPUs."""
GROUP = Sent(sympy.Integer(0), _N * PSI / _M * (_M - 1))
"""A ring within each group."""
ACROSS = Sent(_N * PSI / _N * (_g - 1), sympy.Integer(0))
"""Rings between the groups, of shards."""


def added(*terms: tuple[sympy.Expr | int, Sent]) -> Sent:
    return Sent(
        sum((k * t.between for k, t in terms), sympy.Integer(0)),
        sum((k * t.within for k, t in terms), sympy.Integer(0)),
    )


def test_a_ring_sends_as_much_as_two_levels_but_more_of_it_between_nodes() -> None:
    """The papers' baselines gather in a ring, ours in two levels: equal totals, different links."""
    levels = added((1, GROUP), (1, ACROSS))
    assert same(RING.total, levels.total)
    assert same(RING.between / levels.between, (G - 1) / (g * (N - 1)))


LEVELS = added((1, GROUP), (1, ACROSS))


@pytest.mark.parametrize(
    ("name", "printed", "missing"),
    [
        # An all-reduce of gradients is 2 R as printed; a reduction to the optimizer's shards is enough: R.
        ("zero1", added((3, RING)), -RING.total),
        ("zero2", added((s + 1, RING)), 0),
        ("zero3", added((3 * s, RING)), 0),
        ("zero++", added((2 * s, RING), (s, GROUP)), 0),
        ("paro-iig", added((3 * s, GROUP), (2, ACROSS)), 0),
        # The reduction within the group is printed once, but takes place in every micro-batch.
        ("paro-nig", added((2, GROUP), (2, ACROSS)), (s - 1) * GROUP.total),
    ],
)
def test_paro_table_3(name: str, printed: Sent, missing: sympy.Expr) -> None:
    assert same(ours(name).total, printed.total + missing)


@pytest.mark.parametrize("name", ["paro-iig", "paro-nig"])
def test_paro_table_3_by_link(name: str) -> None:
    """If the paper itself uses two levels, the bytes between groups are equal, too."""
    assert same(ours(name).between, 2 * ACROSS.between)


def test_paro_table_3_mics() -> None:
    """The all-reduce in the update is printed g times too large, and partly within groups.

    Each of M rings has one GPU of every group, so all of its traffic crosses groups; a GPU sends 2 (g - 1)/g
    of its Psi/M.  The printed factor is 2 (g - 1).
    """
    printed = Sent(
        2 * _g * PSI / _M * (_g - 1),
        2 * (_N - _g) * PSI / _M * (_g - 1),
    )
    assert same(ours("mics").within, 3 * s * GROUP.within)
    assert same(ours("mics").between, printed.total / _g)


def test_paro_table_3_igg() -> None:
    """Two terms of the traffic between groups are printed too large.

    In a reduction of Psi/M between g groups each GPU sends (g - 1)/g of Psi/M, not g - 1 times Psi/M; and the
    parameters are gathered once in the update, not once for each micro-batch (IIG's row is right there).
    """
    reduced, gathered = _N * s * PSI / _M * (_g - 1), _N * s * PSI / _N * (_g - 1)
    assert same(ours("paro-igg").within, 3 * s * GROUP.within)
    assert same(ours("paro-igg").between, reduced / _g + gathered / s)


def test_paro_equation_1() -> None:
    """What a reduction in two steps saves each GPU; zero2 (NGG) and paro-nig differ in nothing else."""
    in_one = s * PSI / _N * (_N - 1)
    in_two = s * PSI / _M * (_M - 1) + PSI / _N * (_g - 1)
    saved = PSI * (s - 1) * (_g - 1) / _N
    assert same(in_one - in_two, saved)
    assert same((ours("zero2").total - ours("paro-nig").total) / G, saved)


@pytest.mark.parametrize(
    ("name", "parameters", "gradients", "optimizer", "more"),
    [
        ("zero1", 1, 1, _N, True),
        ("zero2", 1, 1 / _N, _N, True),
        ("zero3", 1 / _N, 1 / _N, _N, False),
        ("mics", 1 / _M, 1 / _M, _M, False),
        ("zero++", 1 / _N + 1 / _M, 1 / _N, _N, False),
        ("paro-igg", 1 / _M, 1 / _N, _N, True),
        ("paro-iig", 1 / _M, 1 / _M, _N, True),
        ("paro-nig", 1, 1 / _M, _N, True),
    ],
)
def test_paro_table_2(
    name: str, parameters: sympy.Expr, gradients: sympy.Expr, optimizer: sympy.Expr, more: bool
) -> None:
    """In units of 2 Psi bytes, K Psi for the optimizer's states.

    more: our home shard stays beside a copy that is kept until it changes; the paper counts the home shard
    among the K bytes, as the optimizer's own copy.  Gradients that accumulate in another scope than the
    optimizer's exist beside the gradient shards for the optimizer; the paper counts only the larger.
    """
    strategy = Strategy.parse(name)
    found = costs(strategy)
    shards = {Scope.GLOBAL: G, Scope.INTRA: g}[strategy.home]
    assert same(K * PSI / shards, K * PSI / optimizer)
    assert same(found.gpu.subs({F: 0}), T * parameters + (T / shards if more else 0))
    waits = gradients if strategy.gradient is not Scope.GLOBAL else 0
    assert same(found.gradients.subs({a: 1}), T * (waits + 1 / shards))
    assert same(T * gradients, T * (waits or 1 / shards))


UNIT = (N - 1) / N


@pytest.mark.parametrize(
    ("name", "full", "frozen"),
    [
        ("zero3", 3 * T, 2 * (F + T) + T),
        ("zero++", 2 * T, (F + T) + T),  # not printed for frozen parameters
        ("fcdp", 2 * T, 2 * T),
    ],
)
def test_fcdp_section_6(name: str, full: sympy.Expr, frozen: sympy.Expr) -> None:
    """Totals of an iteration of one micro-batch; (N - 1)/N of each total is sent between nodes."""
    sent = costs(Strategy.parse(name)).inter.subs({s: 1})
    assert same(sent.subs({F: 0}), full * UNIT)
    assert same(sent, frozen * UNIT)


def test_fcdp_table_1() -> None:
    """Parameters on a GPU and on the host, and the gathers between nodes in a forward and a backward."""
    W = F + T
    memory = {
        name: costs(Strategy.parse(name)) for name in ("zero2", "zero3", "mics", "zero++", "fcdp")
    }
    # The home shard besides, as in PaRO's table 2.
    assert same(memory["zero2"].gpu, W + W / G)
    assert same(memory["zero3"].gpu, W / G)
    # As in section VI; the table prints W S/G, which for subgroups of S = g GPUs is W/N.
    assert same(memory["mics"].gpu, W / g)
    assert not same(memory["mics"].gpu, W * g / G)
    assert same(memory["zero++"].gpu, W / G + W / g)
    # Printed W/G: our frozen home shards leave the GPU, as their node shards are on the host.
    assert same(memory["fcdp"].gpu, W / G - F / G)
    assert same(memory["fcdp"].host.subs({a: 0}), W)

    # A gradient's reduction sends equal bytes in all strategies, so the rest of a step's bytes are gathers.
    def gathered(name: str) -> sympy.Expr:
        return sympy.expand(costs(Strategy.parse(name)).inter.subs({s: 1}) / UNIT) - T

    assert same(gathered("zero3"), 2 * W)
    assert same(gathered("zero++"), W)
    # Printed W/2: eight bits are half of bf16, and the scales of the blocks add 1/128 of W.
    assert same(gathered("zero+++w8").subs({b: 2}), W / 2 * (1 + sympy.Rational(1, 64)))
    assert same(gathered("fcdp"), T)
    assert same(gathered("mics"), T), (
        "its own gathers stay in the node; this is half of the all-reduce"
    )
    # Table I prints W for the backward of ZeRO-2, but its parameters are whole then, gathered in the update.
    assert same(gathered("zero2"), T)


def test_fcdps_example() -> None:
    """30 B parameters in fp16 on 4 nodes of 8 GPUs: 1.9 GB, 7.5 GB, and 60 GB on the host of each node."""
    values = {F: 60 * 10**9, T: 0, N: 4, g: 8, s: 1}
    assert costs(Strategy.parse("zero3")).gpu.subs(values) == sympy.Rational(60, 32) * 10**9
    kept = costs(Strategy.parse("zero++")).gpu - costs(Strategy.parse("zero3")).gpu
    assert kept.subs(values) == 7_500_000_000
    assert costs(Strategy.parse("fcdp")).host.subs(values) == 60 * 10**9
