"""The costs of a strategy, in symbols: bytes that are sent and bytes that are kept, from its fields alone.

N nodes of g ranks, G = N g.  F, T: bytes of frozen and of trainable parameters in the dtype that is gathered,
W = F + T; gradients are counted in that dtype, too.  s: micro-batches of an optimizer step; each of them
gathers the parameters that its forward and its backward read (here: all), with `no_sync` around all but the
last.  a: bytes of an accumulated gradient, in fp32 or wider, per byte of parameter.  b: bytes of an element
before it is quantised; 8 bits take 1 + 1/64 bytes with the scales of the blocks, nf4 takes 17/32 (`formats`).
d: bytes of an exact difference per byte of weights; from 1/16 if no weight changes to 1.
Padding is not counted.

Sources: ZeRO (Rajbhandari et al., 2020), ZeRO++ (Wang et al., 2023), PaRO (Wu et al., 2023, tables 2 and 3),
FCDP (Park et al., table I).
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from fcdp_compile.strategy import Cache, Scope, Strategy
from fcdp_compile.strategy.formats import CODINGS, Format

N, g, s = sympy.symbols("N g s", positive=True, integer=True)
F, T = sympy.symbols("F T", nonnegative=True)
a, b, d = sympy.symbols("a b d", positive=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Bytes sent and bytes kept in an optimizer step in the steady state.

    inter: bytes that one node sends to others.  intra: bytes that one rank sends within its node, on average.
    bus: bytes that one rank copies to and from host memory.  first_inter, first_intra: bytes that the very
    first step sends in addition.
    gpu: bytes of parameters that one rank keeps on the GPU between uses, home shards included.  gradients:
    bytes of gradients that one rank keeps, shards for the optimizer included.  host: bytes in one node's
    memory, gradients included.  The memory figures assume several micro-batches (s > 1).
    """

    inter: sympy.Expr
    intra: sympy.Expr
    bus: sympy.Expr
    first_inter: sympy.Expr
    first_intra: sympy.Expr
    gpu: sympy.Expr
    gradients: sympy.Expr
    host: sympy.Expr


def costs(strategy: Strategy) -> Costs:
    """The costs of a strategy on N > 1 nodes; all that may wait on the host counts as if it did.

    Optimizer states are not counted, in either memory.
    """
    W = F + T
    shards = {Scope.GLOBAL: N * g, Scope.INTRA: g, Scope.NONE: sympy.Integer(1)}[strategy.home]
    is_global, is_whole = strategy.home is Scope.GLOBAL, strategy.home is Scope.NONE
    is_full = strategy.cache is Cache.GPU_FULL
    on_host = strategy.keeps_on_host
    between, within = (N - 1) / N, (g - 1) / g
    frozen, trained = (strategy.formats(is_frozen=is_frozen) for is_frozen in (True, False))
    f_sent, t_sent = F * _part(frozen[0]), T * _part(trained[0])
    kept_on_host = F * _part(frozen[1]) + T * _part(trained[1])
    gradients = _part(strategy.gradient_format)
    # How often weights cross: resident ones once for each change, others in every forward, uncached twice.
    gathered = s * (f_sent + t_sent) * (1 if strategy.cache is not Cache.NONE else 2)
    first = sympy.Integer(0)
    if strategy.is_resident:
        gathered, first = t_sent, f_sent
    is_difference = trained[0] is Format.DELTA
    if is_difference:  # from the second step on; in the first there is no copy
        first += T - t_sent
    # A frozen bucket that is kept in full is gathered within the node once; a node shard in every forward
    # and every backward.
    spread = T if is_full else sympy.Integer(0) if is_whole else 2 * s * W
    # Gradients wait whole and are reduced once, or wait within the node, or are reduced every time.
    times = s if strategy.gradient is Scope.GLOBAL else 1
    within_node = 1 if strategy.gradient is Scope.NONE else s
    waits = {Scope.NONE: a * T, Scope.INTRA: a * T / g}.get(strategy.gradient, sympy.Integer(0))
    # An all-reduce is a reduce-scatter and an all-gather; whole gradients are gathered within the node, too.
    reduced = times * T * gradients * (1 if is_global else 2)
    reduced_within = within_node * T + (T if is_whole else 0)
    # A frozen home shard leaves the GPU if its exact node shard is on the host.
    leaves = on_host and strategy.is_resident and frozen[0] is Format.FULL
    kept = {Cache.GPU: W / g, Cache.GPU_FULL: W}.get(strategy.cache, sympy.Integer(0))
    homes, kept_gradients = (T if leaves else W) / shards, T / shards
    # A store in a cold forward, a load in any other forward and in every backward; gradients both ways.
    kept_on_host *= int(on_host)
    waits_on_host = waits * int(strategy.accumulates_on_host)
    bus = 2 * s * kept_on_host / g + 2 * (s - 1) * waits_on_host
    if is_difference and on_host:  # a rank's own slot to compare, the node shard to add to
        bus += T / (N * g) + T / g
    host = kept_on_host + g * waits_on_host
    if strategy.offloads:  # home shards are loaded for each gather, reduced gradients are stored
        gathers = s * W * (1 if strategy.cache is not Cache.NONE else 2)
        bus += ((T if strategy.is_resident else gathers) + times * T) / shards
        host += g * (homes + kept_gradients)
        homes = kept_gradients = sympy.Integer(0)
    return Costs(
        inter=sympy.factor(reduced * between + (gathered * between if is_global else 0)),
        intra=sympy.factor((spread + reduced_within) * within),
        bus=bus,
        first_inter=sympy.factor(first * between if is_global else sympy.Integer(0)),
        first_intra=sympy.factor((F if is_full else sympy.Integer(0)) * within),
        gpu=sympy.factor(homes + kept),
        gradients=sympy.factor(kept_gradients + waits - waits_on_host),
        host=host,
    )


def _part(wire: Format) -> sympy.Expr:
    """Bytes that are sent for each byte of parameters."""
    if wire.is_exact:
        return sympy.Integer(1) if wire is Format.FULL else d
    return sympy.Rational(CODINGS[wire].value_bytes) / b
