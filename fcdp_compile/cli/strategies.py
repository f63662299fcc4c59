"""`fcdp strategies`: the strategies to choose from, and their costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, fields

from fcdp_compile.cli.command import Answer, Declared, strategy
from fcdp_compile.strategy import MODIFIERS, PRESETS, Cache, Scope, Strategy, aliases_of
from fcdp_compile.strategy.formulas import Costs, costs
from fcdp_compile.tools.view.table import table

SUMMARY = "list the strategies with formulas for their traffic and memory"
DESCRIPTION = (
    "List the strategies that fcdp_compile.shard takes, with the bytes that they send and keep: N nodes of g "
    "ranks, F frozen and T trainable parameter bytes, s micro-batches per optimizer step."
)

_OVER = {Scope.NONE: "no ranks, whole", Scope.INTRA: "a node", Scope.GLOBAL: "all ranks"}

_COLUMNS: dict[str, Callable[[Strategy], str]] = {
    "strategy": lambda s: s.name,
    "also": lambda s: ", ".join(aliases_of(s)),
    "home shards over": lambda s: _OVER[s.home],
    "keeps": lambda s: "nothing" if s.cache is Cache.NONE else _kept(s),
    "gradients wait over": lambda s: _OVER[s.gradient],
}
_FORMULAS = {
    "between nodes, per node": "inter",
    "first step more": "first_inter",
    "within a node, per rank": "intra",
    "host bus, per rank": "bus",
    "parameters on a gpu": "gpu",
    "gradients on a gpu": "gradients",
    "host memory of a node": "host",
}
"""The columns, and the fields of `Costs` in them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `fcdp strategies`."""
    only = "only these strategies, with or without modifiers: fcdp+w8+g4 (default: all presets)"
    parser.add_argument("names", nargs="*", type=strategy, metavar="STRATEGY", help=only)
    add = Declared(parser)
    formulas = (
        "formulas for the bytes that each strategy sends and keeps, instead of its description"
    )
    add.flag("--formulas", formulas)
    add.form(json="a list of objects, formulas as texts")


def run(options: argparse.Namespace) -> Answer:
    """Format the list."""
    chosen: list[Strategy] = list(dict.fromkeys(options.names or PRESETS.values()))
    if options.format == "json":
        return Answer(json.dumps([_record(s, costs(s)) for s in chosen], indent=1))
    after = f"After a +: {', '.join(MODIFIERS)}, such as fcdp+w8+g4."
    if not options.formulas:
        rows = [[of(s) for of in _COLUMNS.values()] for s in chosen]
        text = table(tuple(_COLUMNS), rows, ("left",) * len(_COLUMNS))
        return Answer(
            f"{text}\n\n{after}  --formulas shows the bytes that each strategy sends and keeps."
        )
    of_all = [(s.name, costs(s)) for s in chosen]
    rows = [[name, *(str(getattr(c, f)) for f in _FORMULAS.values())] for name, c in of_all]
    text = table(("strategy", *_FORMULAS), rows, ("left",) * (1 + len(_FORMULAS)))
    note = (
        "Bytes of one optimizer step of s micro-batches on N > 1 nodes of g ranks, with no_sync around all "
        "but the last; F, T: frozen and trainable parameters, a: bytes of an accumulated gradient per byte "
        "of parameter, b: bytes of an element, where something is quantised, d: bytes of a difference per "
        "byte of weights.\nfcdp keeps as much on the "
        f"GPU as there is room for: these formulas assume no room.\n{after}"
    )
    return Answer(f"{text}\n\n{note}")


def _record(strategy: Strategy, cost: Costs) -> dict[str, object]:
    formulas = {f.name: str(getattr(cost, f.name)) for f in fields(cost)}
    point = {k: getattr(v, "value", v) for k, v in asdict(strategy).items()}
    return {**point, "aliases": aliases_of(strategy), "bytes": formulas}


def _kept(strategy: Strategy) -> str:
    return f"{strategy.cache.value}, {strategy.life.value.replace('-', ' ')}"
