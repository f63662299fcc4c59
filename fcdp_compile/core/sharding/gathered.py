"""`with gathered(model):` makes parameters plain and whole on every rank within a block."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fcdp_compile.core.params.inner_cut import InnerTensor, local_part
from fcdp_compile.core.params.mesh import everyone_ranks
from fcdp_compile.core.params.packing import rows_of
from fcdp_compile.core.params.seals import fingerprint
from fcdp_compile.core.ranks.messages import first_other, together
from fcdp_compile.core.sharding.assignment import matching
from fcdp_compile.core.sharding.shard import model_of, state_of
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.optimizers.hooks import WholeParameter
from fcdp_compile.runtime.parameters.record import ParamRecord

Modules = str | nn.Module | Iterable[str | nn.Module] | None


@contextmanager
def gathered(model: nn.Module, modules: Modules = None, writeback: bool = False) -> Iterator[None]:
    """Make parameters of a sharded model plain, whole `nn.Parameter`s on every rank within the block.

        with torch.no_grad(), fcdp_compile.gathered(model):
            model.generate(ids)

    Within the block a forward gathers none of these parameters, so each rank may call their modules as often
    as it likes; a compiled model runs uncompiled there.  Attributes have the dtype of the home shards, but in
    a forward `param_dtype`; tied parameters stay tied.  The whole parameters require no gradients: they are
    trained again after the block, and are constants for other parameters that are trained within.  After the
    block, also after an exception, the parameters are the home shards again, the same objects as before.

    model: compiled or not.  modules: the modules whose parameters are gathered, also those of the modules in
    them: names as in `shard(module_strategies=…)`, with `*` for anything between two dots, or modules; None
    for all.  writeback: keep changes of the parameters.  Every rank must have written the same values.  Only
    cached copies of changed parameters become stale.

    All ranks must enter and leave the block.  A nested block skips parameters that an outer block gathered.

    Memory: the whole parameters of these modules on every rank, and the largest parameter once more while the
    parameters are gathered.

    With "tp" in the mesh, the parameters are those that `shard` got: DTensors on mesh["tp"], or this rank's
    part of a parameter that `declare_part` declared.

    Raises: ValueError or TypeError for modules that the model does not have, and for writeback of parameters
    that an outer block gathered without writeback.  FcdpError on every rank if ranks ask for different things
    or anything has no values yet; on leaving the block, with the home shards unchanged, if the block changed
    parameters without writeback, changed them differently on another rank, or gave them another shape, dtype,
    tie or gradient, and on the other ranks if the block failed on one rank.
    """
    root, state = model_of(model), state_of(model)
    block = _Block(state, _chosen(root, state, modules, writeback=writeback), writeback=writeback)
    block.enter()
    try:
        yield
    except Exception as error:
        block.leave()
        # The other ranks wait for this rank at the end of the block.
        block.tell(f"the block of fcdp_compile.gathered failed: {error}")
        raise
    except BaseException:
        block.leave()
        raise
    block.finish(block.leave())


def _chosen(
    root: nn.Module, state: ShardedModel, modules: Modules, *, writeback: bool
) -> list[ParamRecord]:
    """The parameters to gather, the same on all ranks.

    Raises: the errors of `gathered` on entering.
    """
    problem: Exception | None = None
    found: list[ParamRecord] = []
    try:
        found = _records(root, state, modules, writeback=writeback)
    except (TypeError, ValueError) as error:
        problem = error
    names = "\n".join(r.spec.name for r in found)
    digest = hashlib.sha256(names.encode()).hexdigest()
    text = str(problem) if problem else f"{len(found)} parameters, {writeback=} ({digest[:8]})"
    texts = state.collectives.exchange_texts(text, state.topology.everyone)
    if problem is not None:
        raise problem
    if other := first_other(texts):
        raise FcdpError(
            f"ranks 0 and {other} gather different things: {texts[0]} against {texts[other]}; enter "
            "fcdp_compile.gathered with the same modules on every rank"
        )
    state.unset.refuse("fcdp_compile.gathered")
    return found


def _records(
    root: nn.Module, state: ShardedModel, modules: Modules, *, writeback: bool
) -> list[ParamRecord]:
    inside = {inner for m in _modules(root, modules) for inner in m.modules()}
    found = []
    for key, record in state.records.items():
        if not any(module in inside for module, _ in record.owners()):
            continue
        if (outer := state.whole.get(key)) is None:
            found.append(record)
        elif writeback and not outer.writeback:
            raise ArgumentError(
                f"parameter {record.spec.name!r} cannot be written back: an outer block of "
                "fcdp_compile.gathered gathered it without writeback; pass writeback=True to the outer block"
            )
    return found


def _modules(root: nn.Module, modules: Modules) -> list[nn.Module]:
    if modules is None:
        return [root]
    given = [modules] if isinstance(modules, str | nn.Module) else list(modules)
    by_name = dict(root.named_modules(remove_duplicate=False))
    known = set(by_name.values())
    found = []
    for one in given:
        if isinstance(one, str):
            found += [by_name[name] for name in matching(one, by_name, "modules")]
        elif not isinstance(one, nn.Module):
            raise ArgumentError(f"modules must be names or modules, not {type(one).__name__}")
        elif model_of(one) not in known:
            raise ArgumentError(
                f"modules has a {type(one).__name__} that is not in the model; give modules of the model "
                "that was sharded, or their names"
            )
        else:
            found.append(model_of(one))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """One parameter in the block: its places, its home, and the fingerprint of its values on entering."""

    record: ParamRecord
    places: list[tuple[nn.Module, str]]
    home: nn.Parameter
    mark: int


class _Left(NamedTuple):
    """The values of one parameter at the end of the block, and their fingerprint."""

    values: Tensor
    mark: int


class _Block:
    """One use of `gathered`."""

    def __init__(self, state: ShardedModel, records: list[ParamRecord], *, writeback: bool) -> None:
        self._state = state
        self._records = records
        self._writeback = writeback
        self._inside: list[_Gathered] = []

    def enter(self) -> None:
        """Gather the parameters, one after the other; valid copies of the node save sending between nodes."""
        # Before any is replaced, because a copy of several parameters is valid only for all of them.
        values = self._state.outside.read_all(
            [(r.spec.key, r.peek(), r.spec.home_dtype) for r in self._records]
        )
        for record, value in zip(self._records, values, strict=True):
            inner, home, places = record.spec.inner, record.parameter(), record.owners()
            if inner is not None and inner.mesh is not None and not inner.sums:
                value = InnerTensor(inner).of(value)
            mark = int(fingerprint([local_part(value)]))
            self._inside.append(_Gathered(record=record, places=places, home=home, mark=mark))
            self._state.whole[record.spec.key] = WholeParameter(
                home=home, writeback=self._writeback
            )
            whole = nn.Parameter(value, requires_grad=False)
            for module, name in places:
                module._parameters[name] = whole

    def leave(self) -> list[list[Tensor | None]]:
        """Put the home shards back, without communication; returns what each parameter's places contained."""
        left: list[list[Tensor | None]] = []
        for one in self._inside:
            left.append([module._parameters.get(name) for module, name in one.places])
            del self._state.whole[one.record.spec.key]
            for module, name in one.places:
                module._parameters[name] = one.home
        return left

    def tell(self, problem: str) -> None:
        """Make the other ranks, which are in `finish`, raise because of this rank's problem."""

        def raise_it() -> None:
            raise FcdpError(problem)

        with suppress(FcdpError):
            together(self._state.topology.everyone, raise_it)

    def finish(self, found: list[list[Tensor | None]]) -> None:
        """Compare the values at the end of the block with the other ranks', and write changed values back."""
        group = self._state.topology.everyone
        left: list[_Left] = []
        together(group, lambda: left.extend(map(_left, self._inside, found)))
        changed = [one.mark != was.mark for one, was in zip(left, self._inside, strict=True)]
        words = [one.mark for one in left] + [int(c) for c in changed]
        rows = self._state.collectives.agree(words, group=group) if left else []
        changed = [any(row[len(left) + i] for row in rows) for i in range(len(left))]
        for i, was in enumerate(self._inside):
            if changed[i] and not self._writeback:
                raise FcdpError(
                    f"parameter {was.record.spec.name!r} was changed within fcdp_compile.gathered "
                    "without writeback, so no change was kept; pass writeback=True, or undo the changes "
                    "within the block"
                )
            # If a strategy shards within nodes, the copies of different nodes may differ by rounding.
            if changed[i] and self._differs(was.record, [row[i] for row in rows]):
                raise FcdpError(
                    f"ranks have written different values to parameter {was.record.spec.name!r} within "
                    "fcdp_compile.gathered, so nothing was written back; write the same on every rank"
                )
        self._write(left, changed)

    def _differs(self, record: ParamRecord, marks: list[int]) -> bool:
        """Whether ranks that have the same values have other marks now.  marks: of all ranks."""
        inner = record.spec.inner
        alike: dict[int, set[int]] = {}
        for (_, _, index), rank in everyone_ranks(self._state.topology).items():
            is_cut = inner is not None and inner.dim is not None
            alike.setdefault(index if is_cut else 0, set()).add(marks[rank])
        return any(len(found) > 1 for found in alike.values())

    def _write(self, left: list[_Left], changed: list[bool]) -> None:
        written = []
        for one, was, is_changed in zip(left, self._inside, changed, strict=True):
            if is_changed:
                spec = was.record.spec
                where = self._state.topology.home(spec.strategy.home)
                with torch.no_grad():
                    local = was.record.to_fill(was.home)
                    local.copy_(rows_of(one.values, spec.layout, where.node, where.place))
                written.append(spec.key)
        if written:
            self._state.validity.values_arrived(written)


def _left(was: _Gathered, now: list[Tensor | None]) -> _Left:
    """The values of a parameter at the end of the block; FcdpError if they do not fit the parameter."""
    spec, values = was.record.spec, now[0]
    if values is None or any(v is None for v in now):
        raise FcdpError(
            f"parameter {spec.name!r} was removed within fcdp_compile.gathered; change the model's structure "
            "before fcdp_compile.shard"
        )
    if (values.dtype, tuple(local_part(values).shape)) != (spec.home_dtype, spec.layout.shape):
        raise FcdpError(
            f"parameter {spec.name!r} became {values.dtype} {tuple(values.shape)} within "
            f"fcdp_compile.gathered and is {spec.home_dtype} {spec.layout.shape}; write values into it"
        )
    if any(v is not values for v in now):
        raise FcdpError(
            f"parameter {spec.name!r} is tied, but fcdp_compile.gathered found two tensors in its "
            "places; put the same tensor into all places"
        )
    if values.grad is not None:
        raise FcdpError(
            f"parameter {spec.name!r} got a gradient within fcdp_compile.gathered, where gradients are "
            "not averaged; compute gradients outside of the block"
        )
    values = local_part(values.detach()).to(was.home.device)
    return _Left(values=values, mark=int(fingerprint([values])))
