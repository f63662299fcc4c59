"""The user's choices: a strategy of sharded data parallel training, its formats, its costs in symbols."""

from fcdp_compile.strategy.choices import Algorithm, Cache, GradientOn, Life, Scope
from fcdp_compile.strategy.strategy import MODIFIERS, PRESETS, Strategy, aliases_of

__all__ = [
    "MODIFIERS",
    "PRESETS",
    "Algorithm",
    "Cache",
    "GradientOn",
    "Life",
    "Scope",
    "Strategy",
    "aliases_of",
]
