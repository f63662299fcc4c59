"""`fcdp strategies`: the strategies to choose from, and their costs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields

from fcdp_compile.cli.answer import Answer
from fcdp_compile.cli.tables.table import table
from fcdp_compile.strategy import MODIFIERS, PRESETS, Scope, Strategy, aliases_of
from fcdp_compile.strategy.formulas import Costs, costs

SUMMARY = "list the strategies with formulas for their traffic and memory"
DESCRIPTION = (
    "List the strategies that fcdp_compile.shard takes, with the bytes that they send and keep: N nodes of g "
    "ranks, F frozen and T trainable parameter bytes, s micro-batches per optimizer step."
)

_HEADERS = (
    "strategy",
    "also",
    "home shards over",
    "keeps",
    "gradients wait over",
)
_FORMULAS = (
    "strategy",
    "between nodes, per node",
    "first step more",
    "within a node, per rank",
    "host bus, per rank",
    "parameters on a gpu",
    "gradients on a gpu",
    "host memory of a node",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `fcdp strategies`."""
    parser.add_argument(
        "names",
        nargs="*",
        type=_strategy,
        metavar="STRATEGY",
        help="only these strategies, with or without modifiers: fcdp+w8+g4 (default: all presets)",
    )
    parser.add_argument(
        "--formulas",
        action="store_true",
        help="formulas for the bytes that each strategy sends and keeps, instead of its description",
    )
    parser.add_argument(
        "--format",
        choices=("table", "json"),
        default="table",
        help="table: for reading (default); json: a list of objects, formulas as texts",
    )


def run(options: argparse.Namespace) -> Answer:
    """Format the list."""
    chosen: list[Strategy] = options.names or list(PRESETS.values())
    found = {strategy: costs(strategy) for strategy in chosen}
    if options.format == "json":
        return Answer(json.dumps([_record(s, c) for s, c in found.items()], indent=1))
    if not options.formulas:
        rows = [_row(strategy) for strategy in found]
        text = table(_HEADERS, rows, ("left",) * len(_HEADERS))
        after = f"After a +: {', '.join(MODIFIERS)}, such as fcdp+w8+g4."
        return Answer(
            f"{text}\n\n{after}  --formulas shows the bytes that each strategy sends and keeps."
        )
    rows = [_formulas(strategy, cost) for strategy, cost in found.items()]
    text = table(_FORMULAS, rows, ("left",) * len(_FORMULAS))
    note = (
        "Bytes of one optimizer step of s micro-batches on N > 1 nodes of g ranks, with no_sync around all "
        "but the last; F, T: frozen and trainable parameters, a: bytes of an accumulated gradient per byte "
        "of parameter, b: bytes of an element, where something is quantised.\nfcdp keeps as much on the "
        f"GPU as there is room for: these formulas assume no room.\nAfter a +: {', '.join(MODIFIERS)}, "
        "such as "
        "fcdp+w8+g4."
    )
    return Answer(f"{text}\n\n{note}")


def _strategy(name: str) -> Strategy:
    try:
        return Strategy.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _record(strategy: Strategy, cost: Costs) -> dict[str, object]:
    formulas = {f.name: str(getattr(cost, f.name)) for f in fields(cost)}
    point = {k: getattr(v, "value", v) for k, v in asdict(strategy).items()}
    return {**point, "aliases": aliases_of(strategy), "bytes": formulas}


_OVER = {Scope.NONE: "no ranks, whole", Scope.INTRA: "a node", Scope.GLOBAL: "all ranks"}


def _row(strategy: Strategy) -> tuple[str, ...]:
    kept = "nothing" if strategy.cache.value == "none" else strategy.cache.value
    life = "" if kept == "nothing" else f", {strategy.life.value.replace('-', ' ')}"
    return (
        strategy.name,
        ", ".join(aliases_of(strategy)),
        _OVER[strategy.home],
        kept + life,
        _OVER[strategy.gradient],
    )


def _formulas(strategy: Strategy, cost: Costs) -> tuple[str, ...]:
    return (
        strategy.name,
        str(cost.inter),
        str(cost.first_inter),
        str(cost.intra),
        str(cost.bus),
        str(cost.gpu),
        str(cost.gradients),
        str(cost.host),
    )
