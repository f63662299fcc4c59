"""Find the tensors of a checkpoint that fill each tensor of a model, as `from_pretrained` would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fcdp_compile.errors import ArgumentError, CheckpointError
from fcdp_compile.models.files.safetensors_file import Stored
from fcdp_compile.models.pretrained.conversion import Target, converted
from fcdp_compile.models.pretrained.huggingface import (
    Entry,
    Renamed,
    Renaming,
    Role,
    base_of,
    dtype_of,
    entries_of,
    ignored_patterns,
    reading_order,
    transposed_class,
)
from fcdp_compile.models.pretrained.source import (
    Files,
    Source,
    bytes_of,
    in_file,
    known,
    transposed,
)
from fcdp_compile.models.quantised.interface import Recipe, Saved
from fcdp_compile.models.quantised.weight import QuantisedWeight

_SHOWN = 12  # names of tensors in one message


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """A tensor of the model with all its names, and its sources in a checkpoint, which must be equal.

    weight: the quantised weight that the tensor stands for: on meta, of the shape and dtype of the values
    that the weight is made of.
    is_transposed: whether checkpoints have the weight as [in, out].
    is_refused: whether the checkpoint has a tensor for it that does not fit.
    """

    tensor: Tensor
    entries: list[Entry] = field(default_factory=list)
    weight: QuantisedWeight | None = None
    is_transposed: bool = False
    sources: list[Source] = field(default_factory=list)
    is_refused: bool = False

    @property
    def name(self) -> str:
        """The tensor's first name."""
        return self.entries[0].name

    @property
    def role(self) -> Role:
        """Base if any name is the base's: PEFT refers to some of the base's parameters by more names."""
        roles = [entry.role for entry in self.entries]
        return Role.BASE if Role.BASE in roles else roles[0]

    @property
    def is_noted(self) -> bool:
        """Whether the checkpoint has a tensor for it."""
        return bool(self.sources) or self.is_refused


class Problem(NamedTuple):
    """An error that concerns one tensor.

    kind: "missing" or "unexpected"; empty if `what` is the whole message.  of_head: whether the tensor
    belongs to a head that only the model or only the checkpoint has.
    """

    kind: str
    what: str
    of_head: bool = False


class Match:
    """The tensors of a model and their sources in a checkpoint.

    problems: all that is wrong with the checkpoint.  recipes: those of the weights that the checkpoint has
    quantised already.  renaming: the rules that were used for names and tensors.  kept_copies: names of
    copies that PEFT trains in place of tensors that the checkpoint has, and that keep their values.
    """

    def __init__(
        self, root: nn.Module, tensors: dict[str, Stored], is_unset: Callable[[Held], bool]
    ) -> None:
        """Find a source for every tensor of a model that a checkpoint covers.

        is_unset: whether a tensor has no values yet.  Adapters that the checkpoint lacks are left alone.  A
        copy that PEFT trains in a module's place gets the module's values if it has none.
        """
        self.is_unset = is_unset
        self.base = base_of(root)
        self.renaming = Renaming(self.base)
        self.held: dict[int, Held] = {}
        self.known: dict[str, Held] = {}  # by their names in checkpoints of the base
        self.by_name: dict[str, Held] = {}
        self.copies: dict[str, list[Held]] = {}
        self.weights: dict[QuantisedWeight, tuple[Held, dict[str, Held]]] = {}
        self.saved: dict[str, tuple[QuantisedWeight, Saved]] = {}  # by the name of their state
        self.saved_parts: dict[str, tuple[QuantisedWeight, str]] = {}  # part by its library's name
        self.recipes: dict[QuantisedWeight, Recipe] = {}
        self.transposed = {
            child
            for module in root.modules()
            if transposed_class(module) is not None
            for child in module.children()
        }
        for entry in entries_of(root):
            held = self.held.setdefault(id(entry.tensor), Held(tensor=entry.tensor))
            held.entries.append(entry)
            self.by_name[entry.name] = held
            if isinstance(entry.module, QuantisedWeight):
                self._add_weight(entry.module, entry, held)
            if entry.role is Role.BASE:
                self.known[entry.plain] = held
            elif entry.role is Role.COPY:
                self.copies.setdefault(entry.plain, []).append(held)
        self.problems: list[Problem] = []
        self.kept_copies: list[str] = []
        self._match(tensors)

    @property
    def assigned(self) -> list[Held]:
        """All tensors that have sources, in the order of their first bytes in the files."""

        def first_byte(held: Held) -> tuple[str, int]:
            stored = held.sources[0].leaves[0]
            return str(stored.file), stored.start

        return sorted((h for h in self.held.values() if h.sources), key=first_byte)

    def messages(self, *, head: bool) -> list[str]:
        """Return the problems as messages: one for all of a kind, with some of their names.

        head: whether to tell of heads as well.
        """
        problems = [p for p in self.problems if head or not p.of_head]
        found = [p.what for p in problems if not p.kind]
        for kind in ("missing", "unexpected"):
            if what := [p.what for p in problems if p.kind == kind]:
                more = f" and {len(what) - _SHOWN} more" if len(what) > _SHOWN else ""
                plural = "s" if len(what) > 1 else ""
                found.append(f"{kind} tensor{plural} {', '.join(what[:_SHOWN])}{more}")
        if problems and all(p.of_head for p in problems):
            found.append("head=False leaves heads alone")
        return found

    def _match(self, tensors: dict[str, Stored]) -> None:
        ignore_missing, ignore_unexpected = ignored_patterns(self.base)
        sources = list(self._sources(tensors))
        self._describe_saved(sources)
        for name, source in sources:
            if name in self.saved:  # `_describe_saved` has read it
                continue
            held = self.known.get(name) or self.by_name.get(name)
            weight, part = self.saved_parts.get(name, (None, ""))
            if weight is not None and self._is_saved(weight):
                self._give_part(weight, part, source)
            elif held is not None:
                self._give(held, source)
            elif not ignore_unexpected.search(name):
                of_head = self.renaming.is_foreign_head(source.leaves[0].name, tensors)
                self._note("unexpected", _told(source), of_head=of_head)
        for held in self.held.values():
            names = [entry.plain for entry in held.entries if entry.role is Role.BASE]
            if names and not self._is_given(held) and not any(map(ignore_missing.search, names)):
                of_head = all(map(self.renaming.is_of_head, names))
                self._note("missing", repr(names[0]), of_head=of_head)
        for name, held in self.known.items():
            if held.sources:
                self._give_copies(name, held.sources[0])

    def _add_weight(self, weight: QuantisedWeight, entry: Entry, part: Held) -> None:
        """Let a checkpoint give the values that a quantised weight is made of, under the weight's name."""
        if (quantiser := weight.recipe.quantiser) is None:
            return
        if weight not in self.weights:
            # On meta a library's layer has torch's default dtype, but it quantises values of the model's.
            dtype = dtype_of(self.base) or quantiser.dtype
            values = torch.empty(quantiser.shape, dtype=dtype, device="meta")
            name, plain = (n.rpartition(".")[0] for n in (entry.name, entry.plain))
            whole = Held(tensor=values, weight=weight, is_transposed=weight in self.transposed)
            whole.entries.append(entry._replace(name=name, plain=plain, leaf="", tensor=values))
            self.held[id(values)] = self.by_name[name] = whole
            if entry.role is Role.BASE:
                self.known[plain] = whole
                self._know_saved(weight, plain)
            self.weights[weight] = (whole, {})
        self.weights[weight][1][entry.leaf] = part

    def _know_saved(self, weight: QuantisedWeight, plain: str) -> None:
        """Know the tensors of a weight that its library has quantised and saved; plain: the weight's name."""
        layer, dot, leaf = plain.rpartition(".")
        if (saved := weight.recipe.saved(leaf)) is not None:
            self.saved[layer + dot + saved.state] = weight, saved
            for theirs, part in saved.parts.items():
                self.saved_parts[layer + dot + theirs] = weight, part

    def _describe_saved(self, sources: Sequence[tuple[str, Source]]) -> None:
        """Read what the checkpoint says of weights that it has quantised already."""
        with Files() as files:
            for name, source in sources:
                if name not in self.saved:
                    continue
                weight, saved = self.saved[name]
                whole, parts = self.weights[weight]
                stored = source.leaves[0]
                try:
                    self.recipes[weight], values = saved.read(source.read(files, stored.dtype))
                except ArgumentError as error:
                    self._refuse(whole, f"the weight of {_told(source)} {error}")
                    continue
                for leaf, value in values.items():
                    parts[leaf].sources = [known(stored, value)]

    def _is_saved(self, weight: QuantisedWeight) -> bool:
        """Whether the checkpoint describes the weight as its library saves it."""
        return weight in self.recipes or self.weights[weight][0].is_refused

    def _give_part(self, weight: QuantisedWeight, part: str, source: Source) -> None:
        if weight not in self.recipes:
            return
        held, stored = self.weights[weight][1][part], source.leaves[0]
        is_same_size = stored.size_bytes == held.tensor.nbytes
        if held.tensor.dtype == torch.uint8 and is_same_size and source.is_leaf:
            held.sources = [bytes_of(stored, tuple(held.tensor.shape))]
        else:
            self._give(held, source)

    def _is_given(self, held: Held) -> bool:
        """Whether a tensor has a source, or needs none: a weight's parts follow from its values."""
        if held.weight is not None:
            return any(h.is_noted for h in (held, *self.weights[held.weight][1].values()))
        module = held.entries[0].module
        if isinstance(module, QuantisedWeight) and module in self.weights:
            whole, parts = self.weights[module]
            if whole.is_refused or not any(part.is_noted for part in parts.values()):
                return True
        return held.is_noted

    def _sources(self, tensors: dict[str, Stored]) -> Iterable[tuple[str, Source]]:
        """Yield every source with the name that the model should have for it."""
        to_convert: dict[str, tuple[Renamed, dict[str, list[Source]]]] = {}
        for name in sorted(tensors, key=reading_order):
            leaf = in_file(tensors[name])
            renamed = self.renaming.of(name, self.known)
            if renamed.name not in self.known and name in self.by_name:
                yield name, leaf
            elif renamed.converter is None:
                yield renamed.name, leaf
            else:
                _, collected = to_convert.setdefault(renamed.name, (renamed, {}))
                collected.setdefault(renamed.pattern, []).append(leaf)
        shapes = {name: tuple(held.tensor.shape) for name, held in self.known.items()}
        for name, (renamed, collected) in to_convert.items():
            target = Target(name=name, base=self.base, shape_of=shapes.get)
            try:
                yield from converted(renamed.converter, collected, target).items()
            except CheckpointError as error:
                self._note("", str(error))

    def _give(self, held: Held, source: Source) -> None:
        if held.weight is not None and not source.leaves[0].dtype.is_floating_point:
            self._refuse(
                held,
                f"tensor {_told(source)} is quantised already, but not as the model's layer is; build "
                "the model with the checkpoint's quantization_config, or give the checkpoint that it was "
                "quantised from",
            )
            return
        if held.is_transposed and len(source.shape) == 2:
            source = transposed(source, 0, 1)
        if source.shape != tuple(held.tensor.shape):
            self._refuse(
                held,
                f"tensor {_told(source)} is {source.shape} and {tuple(held.tensor.shape)} in the model",
            )
            return
        for stored in source.leaves:
            if not _can_cast(stored.dtype, held.tensor.dtype):
                self._refuse(
                    held,
                    f"tensor {_told(source)} is {stored.dtype}, which cannot be cast to the model's "
                    f"{held.tensor.dtype}",
                )
                return
        held.sources.append(source)

    def _refuse(self, held: Held, what: str) -> None:
        held.is_refused = True
        self._note("", what)

    def _note(self, kind: str, what: str, *, of_head: bool = False) -> None:
        self.problems.append(Problem(kind, what, of_head))

    def _give_copies(self, name: str, source: Source) -> None:
        for copy in self.copies.get(name, ()):
            if copy.sources:
                continue
            if self.is_unset(copy):
                self._give(copy, source)
            else:
                self.kept_copies.append(copy.name)


def _told(source: Source) -> str:
    """Return the names of a source's tensors, and the first tensor's file."""
    stored, *others = source.leaves
    more = f" and {len(others)} others" if others else ""
    return f"{stored.name!r}{more} of {stored.file.name}"


def _can_cast(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Whether a cast only rounds; a cast between whole numbers must keep every value."""
    if dtype.is_floating_point and to.is_floating_point:
        return True
    is_float = dtype.is_floating_point or to.is_floating_point or to.is_complex
    return dtype == to or (not is_float and torch.promote_types(dtype, to) == to)
