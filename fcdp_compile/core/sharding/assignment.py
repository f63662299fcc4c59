"""Assign a strategy to each parameter: the strategy of its innermost module that was given one."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping

from torch import nn

from fcdp_compile.errors import ArgumentError, did_you_mean
from fcdp_compile.strategy import Strategy


def chosen_strategy(strategy: str | Strategy, reshard_after_forward: bool | int | None) -> Strategy:
    """The strategy that was asked for.

    Raises: ArgumentError for an option that is not the strategy's.
    """
    chosen = Strategy.parse(strategy)
    if reshard_after_forward is not None and chosen != Strategy.parse("fsdp"):
        raise ArgumentError(
            f"reshard_after_forward is an option of strategy 'fsdp', not of {chosen.name!r}, which "
            "already decides what is kept; leave it out"
        )
    return chosen


def adapted(
    chosen: Strategy,
    reshard_after_forward: bool | int | None,
    gradient_on: str | None,
    ranks_per_node: int,
) -> Strategy:
    """The strategy with the options that `shard` was given."""
    if reshard_after_forward is not None:
        chosen = Strategy.fsdp(reshard_after_forward, ranks_per_node)
    return chosen if gradient_on is None else chosen.with_gradients_on(gradient_on)


def assign(
    root: nn.Module,
    parameters: Collection[nn.Parameter],
    default: Strategy,
    by_module: Mapping[str, str | Strategy],
) -> dict[nn.Parameter, Strategy]:
    """The strategy of each of these parameters.

    by_module: strategies by names of modules, in which `*` stands for anything between two dots.

    Raises: TypeError if `by_module` is not a mapping of names; ValueError for a name that no module has, for
    two names that give one module different strategies, and for a tied parameter whose modules have different
    strategies; the errors of `Strategy.parse`.
    """
    if not isinstance(by_module, Mapping) or not all(isinstance(n, str) for n in by_module):
        raise ArgumentError(
            "module_strategies must map names of modules to strategies, such as "
            f"{{'model.embed_tokens': 'ddp'}}, not {by_module!r}"
        )
    modules = dict(root.named_modules(remove_duplicate=False))
    given: dict[str, tuple[str, Strategy]] = {}
    for pattern, name in by_module.items():
        strategy = Strategy.parse(name)
        for module in matching(pattern, modules, "module_strategies"):
            other, its = given.setdefault(module, (pattern, strategy))
            if its != strategy:
                raise ArgumentError(
                    f"module {module!r} gets strategy '{its}' from {other!r} and '{strategy}' from "
                    f"{pattern!r} in module_strategies; give the module only one strategy"
                )
    found: dict[nn.Parameter, tuple[str, Strategy]] = {}
    for path, module in modules.items():
        inner = next((p for p in _and_those_around(path) if p in given), None)
        strategy = default if inner is None else given[inner][1]
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if parameter not in parameters:
                continue
            other, its = found.setdefault(parameter, (name, strategy))
            if its != strategy:
                raise ArgumentError(
                    f"parameters {other!r} and {name!r} are tied, but module_strategies gives them "
                    f"'{its}' and '{strategy}'; give both modules the same strategy, or untie the parameters"
                )
    return {parameter: strategy for parameter, (_, strategy) in found.items()}


def matching(pattern: str, modules: Iterable[str], option: str) -> list[str]:
    """The modules whose names match a pattern, in which `*` stands for anything between two dots.

    option: the option that the pattern was given to.

    Raises: ValueError if no name matches, and for the empty name, which is the model itself.
    """
    if not pattern:
        raise ArgumentError(
            f"{option} names '', the model itself; leave {option} out to mean the whole model"
        )
    parts = pattern.split(".")
    found = [m for m in modules if m and _matches(parts, m.split("."))]
    if not found:
        hint = did_you_mean(pattern, modules)
        raise ArgumentError(
            f"{option} names {pattern!r}, but no module of the model matches it{hint}"
        )
    return found


def _matches(pattern: list[str], path: list[str]) -> bool:
    if len(pattern) != len(path):
        return False
    return all(fnmatch.fnmatchcase(a, b) for a, b in zip(path, pattern, strict=True))


def _and_those_around(path: str) -> list[str]:
    """The names of a module and of the modules around it, innermost first."""
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
