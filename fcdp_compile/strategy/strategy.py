"""Strategies of sharded data parallel training as points of one space: home x cache x gradient.

Scopes: `NONE` whole on every rank, `INTRA` sharded within a node, `GLOBAL` sharded over all ranks
(PaRO's N, I, G).  A preset is a line of `PRESETS`; nothing else in the code knows a strategy by name.

Sources: ZeRO (Rajbhandari et al., 2020), ZeRO++ (Wang et al., 2023), PaRO (Wu et al., 2023),
FCDP (Park et al.).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from fcdp_compile.errors import ArgumentError, did_you_mean
from fcdp_compile.strategy.choices import Algorithm, Cache, GradientOn, Life, Scope
from fcdp_compile.strategy.formats import Format

_PLAIN = (Format.FULL, Algorithm.HIERARCHICAL)
_FORMATS = {
    "weight_format": (Format.INT8, Format.DELTA),
    "gradient_format": (Format.INT8, Format.INT4),
    "host_format": (Format.INT8,),
    "frozen_format": (Format.NF4, Format.INT8),
}
"""What may be sent how: 4 whole levels are too few for weights, and NF4's code book is made for weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A strategy: one point of the space home x cache x gradient.

    name: the preset's name, for people.
    home: how widely the optimizer's shards are split.
    cache, life: where a gathered node shard waits, and until when.
    gradient: scope at which gradients accumulate between micro-batches (`fcdp_compile.no_sync`).
    gradient_on: where these gradients wait.
    weight_format, gradient_format: formats of weights and gradients between nodes, if they are smaller;
    a delta is for trainable weights.
    host_format: the format of node shards in host memory.
    frozen_format: the format of frozen weights in both places, if it is another one.
    algorithm: of gathers between nodes.
    whole_matrices: whether each trainable matrix has a home node, which owns all its rows (Muon).
    offloads: whether home shards and their gradients are in host memory, where optimizers step; frozen shards
    that leave the GPU anyway, once the cache has their values, do not count (`core.params.spec.may_leave`).

    Raises: ValueError for a point that is not available.
    """

    name: str
    home: Scope
    cache: Cache
    life: Life
    gradient: Scope
    gradient_on: GradientOn = GradientOn.AUTO
    weight_format: Format = Format.FULL
    gradient_format: Format = Format.FULL
    host_format: Format = Format.FULL
    frozen_format: Format = Format.FULL
    algorithm: Algorithm = Algorithm.HIERARCHICAL
    whole_matrices: bool = False
    offloads: bool = False

    def __post_init__(self) -> None:
        self._check_scopes()
        self._check_formats()
        self._check_algorithm()
        self._check_matrices()
        if self.gradient is Scope.GLOBAL and self.gradient_on is GradientOn.HOST:
            raise ArgumentError(
                f"strategy {self.name!r} reduces every micro-batch's gradients to the home shards, so none "
                "wait on the host; use gradient_on='auto', or a strategy that accumulates, such as 'fcdp'"
            )
        if self.offloads and self.home is Scope.NONE:
            raise ArgumentError(
                f"strategy {self.name!r} keeps all parameters on every rank, so each rank's host would step "
                "all of them; offload them with a strategy that shards home shards, such as 'fcdp'"
            )

    def __str__(self) -> str:
        """The name, and in parentheses the fields that differ from the preset of that name."""
        try:
            named = Strategy.parse(self.name)
        except ValueError:
            named = None
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        other = {n: v for n, v in values.items() if named is None or getattr(named, n) != v}
        shown = ", ".join(f"{n}={getattr(v, 'value', v)}" for n, v in other.items())
        return f"{self.name} ({shown})" if shown else self.name

    def _check_scopes(self) -> None:
        widths = list(Scope)
        if widths.index(self.gradient) > widths.index(self.home):
            raise ArgumentError(
                f"strategy {self.name!r} shards gradients ({self.gradient.value}) over more ranks than "
                f"optimizer states ({self.home.value}); PaRO's Principle 1 rules it out"
            )
        useful = {
            Scope.NONE: [Cache.NONE],
            Scope.INTRA: [Cache.NONE, Cache.GPU_FULL],
            Scope.GLOBAL: list(Cache),
        }
        if self.cache not in useful[self.home]:
            raise ArgumentError(
                f"strategy {self.name!r} caches gathered copies ({self.cache.value}), but home shards of "
                f"scope {self.home.value} are just as large; use cache none"
            )

    def _check_formats(self) -> None:
        chosen = {name: getattr(self, name) for name in _FORMATS}
        if self.home is not Scope.GLOBAL and set(chosen.values()) != {Format.FULL}:
            raise ArgumentError(
                f"strategy {self.name!r} keeps whole copies on every node, so no gather or scatter "
                "between nodes could use a format; use a strategy that shards over all ranks, such as 'fcdp'"
            )
        for name, asked in chosen.items():
            if asked not in (Format.FULL, *_FORMATS[name]):
                raise ArgumentError(
                    f"strategy {self.name!r} has {name} {asked.value}, which is not for these values; use "
                    f"{' or '.join(f.value for f in _FORMATS[name])}"
                )
        if self.weight_format is Format.DELTA and not self.is_resident:
            raise ArgumentError(
                f"strategy {self.name!r} keeps no weights until they change, so there is nothing that a "
                "difference could be taken from; use a strategy that keeps them, such as 'fcdp+delta'"
            )
        if self.host_format is self.frozen_format is Format.FULL:
            return
        if not self.keeps_on_host:
            raise ArgumentError(
                f"strategy {self.name!r} keeps no node shards on the host, so no format for them can be "
                "chosen; leave 'c8' and 'c4' out, or use 'fcdp'"
            )
        if self.host_format is not Format.FULL and self.weight_format.is_exact:
            # A backward would compute with other weights than its forward.
            raise ArgumentError(
                f"strategy {self.name!r} keeps weights on the host in format {self.host_format.value}, but "
                f"receives them in format {self.weight_format.value}; set weight_format to host_format"
            )

    def _check_algorithm(self) -> None:
        if self.algorithm is not Algorithm.HIERARCHICAL and self.home is not Scope.GLOBAL:
            raise ArgumentError(
                f"strategy {self.name!r} keeps whole copies on every node and gathers nothing between nodes, "
                f"with {self.algorithm.value!r} or without; use a strategy that shards over all ranks"
            )

    def _check_matrices(self) -> None:
        if not self.whole_matrices:
            return
        if self.home is not Scope.GLOBAL:
            raise ArgumentError(
                f"strategy {self.name!r} keeps whole matrices on every node already; leave 'matrix' out"
            )
        is_plain = (self.gradient_format, self.algorithm) == _PLAIN
        if not (self.weight_format.is_exact and is_plain):
            raise ArgumentError(
                f"strategy {self.name!r} has modifiers that do not work with 'matrix'; leave one out"
            )

    @property
    def is_resident(self) -> bool:
        """Whether a cached node shard outlives the backward, so that the next forward may reuse it."""
        return self.cache is not Cache.NONE and self.life is Life.UNTIL_CHANGED

    @property
    def keeps_on_host(self) -> bool:
        """Whether cached node shards may wait in host memory."""
        return self.cache in (Cache.HOST, Cache.ADAPTIVE)

    @property
    def uses_host(self) -> bool:
        """Whether anything may wait in host memory."""
        return self.keeps_on_host or self.accumulates_on_host

    @property
    def may_keep_full(self) -> bool:
        """Whether gathered parameters may stay on the GPU between their uses."""
        return self.cache in (Cache.ADAPTIVE, Cache.GPU_FULL)

    @property
    def accumulates_on(self) -> GradientOn | None:
        """Where gradients of micro-batches wait; None if each is reduced to the home shards.

        "auto" means the GPU if the strategy keeps no node shards on the host.
        """
        if self.gradient is Scope.GLOBAL:
            return None
        is_all_on_gpu = self.gradient_on is GradientOn.AUTO and not self.keeps_on_host
        return GradientOn.GPU if is_all_on_gpu else self.gradient_on

    @property
    def accumulates_on_host(self) -> bool:
        """Whether gradients of micro-batches may wait on the host."""
        return self.accumulates_on in (GradientOn.AUTO, GradientOn.HOST)

    def formats(self, *, is_frozen: bool) -> tuple[Format, Format]:
        """The formats of weights between nodes and on the host."""
        if is_frozen and self.frozen_format is not Format.FULL:
            return self.frozen_format, self.frozen_format
        if is_frozen and self.weight_format is Format.DELTA:  # they do not change
            return Format.FULL, self.host_format
        return self.weight_format, self.host_format

    def with_exact_weights(self) -> Strategy:
        """The same strategy with all weights sent and kept as they are."""
        full = Format.FULL
        return replace(self, weight_format=full, host_format=full, frozen_format=full)

    def on_one_node(self, ranks_per_node: int) -> Strategy:
        """The same strategy on one node, where home shards are node shards: without formats and algorithms.

        Of its caches, whole buckets remain, and the host for shards that leave the GPU
        (`core.params.spec.bucket_strategy`).
        """
        gradient = Scope.GLOBAL if self.gradient is Scope.INTRA else self.gradient
        leaves = self.keeps_on_host and self.is_resident
        keeps = ranks_per_node > 1 and (leaves or self.cache is Cache.GPU_FULL)
        return replace(
            self.with_exact_weights(),
            home=Scope.GLOBAL if self.home is Scope.INTRA else self.home,
            cache=self.cache if keeps else Cache.NONE,
            life=self.life if keeps else Life.UNTIL_BACKWARD,
            gradient=gradient,
            gradient_on=GradientOn.AUTO if gradient is Scope.GLOBAL else self.gradient_on,
            gradient_format=Format.FULL,
            algorithm=Algorithm.HIERARCHICAL,
            whole_matrices=False,
        )

    def without_cache(self) -> Strategy:
        """The same strategy, but nothing is cached."""
        return replace(self, cache=Cache.NONE, life=Life.UNTIL_BACKWARD)

    def without_host(self) -> Strategy:
        """The same strategy for a GPU whose memory is the host's: what would wait there stays on the GPU."""
        full = Format.FULL
        return replace(
            self,
            cache=Cache.GPU if self.keeps_on_host else self.cache,
            gradient_on=GradientOn.GPU,
            host_format=full,
            frozen_format=full,
        )

    def with_gradients_on(self, place: str) -> Strategy:
        """The same strategy with accumulated gradients in the given place.

        Raises: ValueError for an unknown place, and for a place that the strategy cannot use.
        """
        places = [p.value for p in GradientOn]
        if place not in places:
            raise ArgumentError(f"gradient_on must be one of {', '.join(places)}, not {place!r}")
        return replace(self, gradient_on=GradientOn(place))

    @staticmethod
    def fsdp(reshard_after_forward: bool | int, ranks_per_node: int) -> Strategy:
        """The strategy for FSDP2's option of that name: True: zero3; the number of ranks of a node: zero++.

        False: gathered parameters stay on the GPU until the backward.

        Raises: TypeError or ValueError for anything else.
        """
        if not isinstance(reshard_after_forward, int):
            raise ArgumentError(
                "reshard_after_forward must be True, False or the number of ranks of a node, not "
                f"{type(reshard_after_forward).__name__}"
            )
        if reshard_after_forward is True:
            return PRESETS["zero3"]
        if reshard_after_forward is False:
            name = "fsdp, reshard_after_forward=False"
            return _preset(name, Cache.GPU_FULL, Life.UNTIL_BACKWARD, Scope.GLOBAL)
        if reshard_after_forward != ranks_per_node:
            raise ArgumentError(
                f"reshard_after_forward={reshard_after_forward} is not the {ranks_per_node} ranks of a node, "
                "which is what parameters can be resharded to; group ranks with make_mesh(nodes=…)"
            )
        return PRESETS["zero++"]

    @staticmethod
    def parse(name: str | Strategy) -> Strategy:
        """Look a preset up by name, with modifiers joined by `+`: "fcdp+w8+g4" (`MODIFIERS`).

        Raises: TypeError for anything but a name or a Strategy, ValueError for an unknown name or modifier
        (with the known and the nearest names), for modifiers that contradict each other or the preset, and
        for an invalid code of PaRO.
        """
        if isinstance(name, Strategy):
            return name
        if not isinstance(name, str):
            raise ArgumentError(f"strategy must be a name or a Strategy, not {type(name).__name__}")
        if PARO.match(name):
            name = name.lower()
        names = [*PRESETS, *_ALIASES]
        # The longest first: "zero++" is not "zero" with modifiers.
        for known in sorted(names, key=len, reverse=True):
            if name == known or name.startswith(f"{known}+"):
                preset = PRESETS[_ALIASES.get(known, known)]
                return _modified(preset, name[len(known) + 1 :].split("+"), name)
        if (code := PARO.match(name)) is not None:
            raise ArgumentError(why_no_paro(name, code[1]))
        hint = did_you_mean(name.lower().partition("+")[0] or name, names)
        raise ArgumentError(f"unknown strategy {name!r}; choose one of {', '.join(names)}{hint}")


def _preset(
    name: str, cache: Cache, life: Life, gradient: Scope, home: Scope = Scope.GLOBAL
) -> Strategy:
    return Strategy(name=name, home=home, cache=cache, life=life, gradient=gradient)


_KEPT = {
    "n": (Cache.GPU_FULL, Life.UNTIL_CHANGED),
    "i": (Cache.GPU, Life.UNTIL_CHANGED),
    "g": (Cache.NONE, Life.UNTIL_BACKWARD),
}
"""Where gathered parameters stay, and how long, for each of PaRO's scopes of parameters."""

_SCOPES = {"n": Scope.NONE, "i": Scope.INTRA, "g": Scope.GLOBAL}


def _paro(code: str, name: str = "") -> Strategy:
    """PaRO's strategy of that code: scopes of parameters, gradients and optimizer states."""
    # If parameters are as widely sharded as home shards, there is nothing to keep.
    parameters = "g" if code[0] == code[2] else code[0]
    return _preset(name or f"paro-{code}", *_KEPT[parameters], _SCOPES[code[1]], _SCOPES[code[2]])


PRESETS: dict[str, Strategy] = {
    s.name: s
    for s in (
        _paro("nnn", "ddp"),
        _paro("nng", "zero1"),
        _paro("ngg", "zero2"),
        _paro("ggg", "zero3"),
        _preset("zero++", Cache.GPU, Life.UNTIL_BACKWARD, Scope.GLOBAL),
        _paro("iii", "mics"),
        *(_paro(code) for code in ("nni", "nii", "ini")),
        *(_paro(code) for code in ("nig", "ing", "iig", "igg", "gng", "gig")),
        _preset("fcdp", Cache.ADAPTIVE, Life.UNTIL_CHANGED, Scope.INTRA),
    )
}

_ALIASES = {
    "fsdp": "zero3",
    "hpz": "zero++",
    "hsdp": "mics",
    "paro-nnn": "ddp",
    "paro-iii": "mics",
    "paro-nng": "zero1",
    "paro-ngg": "zero2",
    "paro-ggg": "zero3",
}
"""Other names of presets."""


def aliases_of(strategy: Strategy) -> list[str]:
    """The other names of a preset."""
    return [alias for alias, name in _ALIASES.items() if name == strategy.name]


MODIFIERS: dict[str, dict[str, Format | Algorithm | bool]] = {
    "w8": {"weight_format": Format.INT8},
    "delta": {"weight_format": Format.DELTA},
    "g8": {"gradient_format": Format.INT8},
    "g4": {"gradient_format": Format.INT4},
    "c8": {"weight_format": Format.INT8, "host_format": Format.INT8},
    "c4": {"frozen_format": Format.NF4},
    "ho_ring": {"algorithm": Algorithm.HO_RING},
    "matrix": {"whole_matrices": True},
    "offload": {"offloads": True},
}
"""The modifiers of a preset's name; w8 is ZeRO++'s qwZ, g8 is its qgZ, g4 too with other levels, c4 is NF4.

delta: trainable weights of 16 bits are sent as exact differences (`formats` [Note: differences])."""


def _modified(preset: Strategy, modifiers: list[str], name: str) -> Strategy:
    if name in (preset.name, *aliases_of(preset)):
        return preset
    chosen: dict[str, Any] = {}
    for modifier in modifiers:
        if modifier not in MODIFIERS:
            hint = did_you_mean(modifier.lower(), MODIFIERS)
            raise ArgumentError(
                f"strategy {name!r} has an unknown modifier {modifier!r}; choose from "
                f"{', '.join(MODIFIERS)}{hint}"
            )
        for field, value in MODIFIERS[modifier].items():
            if chosen.setdefault(field, value) is not value:
                rivals = [m for m in MODIFIERS if field in MODIFIERS[m] and m in modifiers]
                raise ArgumentError(
                    f"strategy {name!r} has two modifiers for the same choice; give one of "
                    f"{' and '.join(rivals)}"
                )
    given = [m for m in MODIFIERS if m in modifiers]
    return replace(preset, name="+".join([preset.name, *given]), **chosen)


PARO = re.compile(r"paro-([nig]{3})(?=\+|$)", re.IGNORECASE)
"""A name with one letter each for the scope of parameters, of gradients and of optimizer states."""


def why_no_paro(name: str, code: str) -> str:
    """Why a code of PaRO is not a preset."""
    parameters, gradients, states = ("nig".index(scope) for scope in code.lower())
    for what, scope in (("parameters", parameters), ("gradients", gradients)):
        if scope > states:
            return (
                f"strategy {name!r} shards {what} over more ranks than optimizer states, so a rank would "
                f"step values whose {what} it does not hold; PaRO's Principle 1 rules it out"
            )
    raise AssertionError(f"{name} is valid, but not a preset")
