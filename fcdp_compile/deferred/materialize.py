"""`materialize(model)`: give a model that was built on meta the values that its own modules give it.

Module by module: whole tensors on the device for what one initialisation touches, that initialisation, this
rank's rows kept, the rest freed.  So no rank ever has more than its home shards and the largest module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fcdp_compile.deferred.initialisation import lost_attributes, steps_of, tied_to_others
from fcdp_compile.deferred.stand_ins import (
    Slot,
    Strays,
    Touched,
    generator_states,
    has_unset,
    rehearse,
    set_generators,
    standing_in,
)
from fcdp_compile.errors import FcdpError
from fcdp_compile.params.fingerprint import fingerprint
from fcdp_compile.params.home_shard import rows_of
from fcdp_compile.ranks.all_or_none import together
from fcdp_compile.ranks.messages import broadcast_first
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.sharding.shard import model_of, state_of
from fcdp_compile.torch_compat import FakeTensorMode


def materialize(model: nn.Module) -> None:
    """Initialise what the model was built on meta with, by the modules' own initialisation; in place.

    `reset_parameters()` of each module, `_init_weights` of a Hugging Face model, PEFT's for adapters, in the
    order in which an ordinary build calls them.  Every rank draws the whole of every parameter as rank 0's
    random number generators stand and keeps its rows: the values are, bit for bit, those of an unsharded
    build on the same device (`with torch.device(device):`) after the same seed, on any number of ranks and
    with any strategy, for modules that draw in these methods alone.  (Those that draw in their constructor
    otherwise, as Hugging Face's GPT-2 does, get other values of the same distribution; so do PEFT's adapters
    of a bf16 or fp16 base, which an ordinary build rounds to the base's dtype.)  Buffers are filled too.
    Of tied parameters the first has the say, or the one that a Hugging Face model ties the others to.

    What has values already keeps them: after `load_pretrained`, or for a model of which only the adapters
    were built on meta.  With nothing on meta this does nothing.  All ranks must call it.

    Afterwards the generators stand where an unsharded build leaves rank 0's; on a rank whose generators stood
    elsewhere than rank 0's, where they stood.  The device's memory holds at most the home shards and what the
    largest initialisation touches: one module's parameters, mostly.

    Raises: FcdpError on every rank, with nothing changed, for parameters and buffers without any
    initialisation, all of them named; if an initialisation fails, leaves a parameter partly unset, or gave
    other values on another rank, with everything still without values.  ValueError for a model that is not
    sharded.
    """
    root, state = model_of(model), state_of(model)
    with torch.device("cpu"):  # also within `with torch.device("meta")`
        _agree_on_awaited(state)
        if state.unset:
            _Materialisation(root, state).run()


def _agree_on_awaited(state: ShardedModel) -> None:
    """Raise on every rank if ranks have values of different tensors."""
    names = state.unset.names()
    mark = int(hashlib.sha256("\n".join(names).encode()).hexdigest()[:15], 16)
    rows = state.collectives.agree([mark])
    if any(row[0] != mark for row in rows):
        raise FcdpError(
            f"ranks have values of different parameters (this one lacks {len(names)}, {names[:1]} first); "
            "load the same on every rank before fcdp_compile.materialize"
        )


class _Materialisation:
    """One call of `materialize`."""

    def __init__(self, root: nn.Module, state: ShardedModel) -> None:
        self._root = root
        self._state = state
        self._device = state.device.torch
        self._slots = slots_of(root, state)
        # Buffers by name as they will be; they stay out of the model until everything has worked.
        self._buffers: dict[str, Tensor] = {
            s.full_name: s.unset(self._device)
            for s in self._slots
            if s.is_buffer and s.gives and not s.original.numel()
        }
        self._written: set[str] = set()
        self._marks: dict[str, Tensor] = {}
        self._failure: FcdpError | None = None

    def run(self) -> None:
        """Initialise everything that awaits values."""
        plan: list[Touched] = []
        with standing_in(self._slots, self._device) as mode:

            def planned() -> None:
                plan.extend(self._plan(mode))

            together(self._state.topology.control, planned)
            strays = Strays(self._slots)
            with _as_rank_0(self._state):
                for touched in plan:
                    values = self._values(touched)
                    if self._failure is None:
                        try:
                            self._initialise(touched, values, strays)
                        except Exception as error:
                            # Whatever it is, the others have to hear of it before they wait for this rank.
                            self._failure = FcdpError(f"{touched.step.what} failed: {error}")
                self._meet()
                together(self._state.topology.control, self._check_set)
                self._check_same()
        for slot in self._slots:
            if slot.is_buffer and slot.is_awaited:
                slot.held[slot.name] = self._buffers[slot.full_name]
        unset = self._state.unset
        self._state.validity.values_arrived(list(unset.keys), list(unset.buffers))

    def _plan(self, mode: FakeTensorMode) -> list[Touched]:
        if lost := lost_attributes(self._root):
            raise FcdpError(
                f"{_listed(lost)} on meta and neither a parameter nor a buffer, so nothing would give values;"
                " register a buffer, or make it from numbers in forward"
            )
        plan = rehearse(steps_of(self._root), self._slots, mode, self._device)
        given = {s for t in plan for s, touch in t.slots.items() if touch.writes and s.gives}
        lacking = [s for s in self._slots if s.gives and s not in given and s.original.numel()]
        if lacking:
            names = [f"{s.full_name} ({type(s.module).__name__})" for s in lacking]
            raise FcdpError(
                f"{_listed(names)} without an initialisation; give the class reset_parameters() that sets"
                " all parameters and buffers, or give them values by load_pretrained or load_state_dict"
            )
        return plan

    # --- one initialisation -------------------------------------------------------------------------------

    def _values(self, touched: Touched) -> dict[Slot, Tensor]:
        """What to put into the slots it touches; gathers, with all ranks, what it needs the values of."""
        gathered = {
            s: t for s, t in touched.slots.items() if t.needs_values and self._has_values(s)
        }
        found = {}
        if any(s.record is not None for s in gathered):
            self._meet()
        for slot in gathered:
            if slot.record is not None:
                spec = slot.record.spec
                local = slot.record.local_of(slot.original)
                found[slot] = self._state.gather(spec.key, local, spec.home_dtype)
        return found

    def _has_values(self, slot: Slot) -> bool:
        return not slot.is_awaited or slot.full_name in self._written

    def _initialise(self, touched: Touched, values: dict[Slot, Tensor], strays: Strays) -> None:
        try:
            for slot in touched.slots:
                slot.held[slot.name] = slot.wrap(self._whole(slot, values))
            values.clear()
            with torch.no_grad(), self._device, strays.refused():
                touched.step.act()
            for slot, touch in touched.slots.items():
                if slot.gives and touch.writes:
                    self._keep(slot, slot.held[slot.name].detach())
        finally:
            for slot in touched.slots:
                slot.held[slot.name] = slot.resting

    def _whole(self, slot: Slot, values: dict[Slot, Tensor]) -> Tensor:
        if slot in values:
            return values[slot]
        if slot.record is None:
            if slot.full_name in self._buffers:
                made = self._buffers[slot.full_name]
                return made if slot.gives else made.clone()
            if not slot.is_awaited:
                return slot.original.detach().clone()
        return slot.unset(self._device)

    def _keep(self, slot: Slot, whole: Tensor) -> None:
        if whole.shape != slot.original.shape:
            raise FcdpError(
                f"{slot.full_name} became {tuple(whole.shape)} and is {tuple(slot.original.shape)}"
            )
        whole = whole.to(self._device, slot.original.dtype)
        if slot.record is None:
            self._buffers[slot.full_name] = whole
        else:
            spec = slot.record.spec
            where = self._state.topology.home(spec.strategy.home)
            local = slot.record.local_of(slot.original)
            local.copy_(rows_of(whole, spec.layout, where.node, where.place))
        self._written.add(slot.full_name)
        if self._state.topology.ranks > 1:
            self._marks[slot.full_name] = fingerprint([whole])

    # --- what ranks tell each other -----------------------------------------------------------------------

    def _meet(self) -> None:
        """Raise on every rank if an initialisation has failed on any."""

        def failed() -> None:
            if self._failure is not None:
                raise self._failure

        together(self._state.topology.control, failed)

    def _check_set(self) -> None:
        """Raise if an initialisation left something unset that it should set."""
        unset = []
        for slot in self._slots:
            if slot.gives:
                held = (
                    self._buffers[slot.full_name]
                    if slot.record is None
                    else slot.record.local_of(slot.original)
                )
                if has_unset(held):
                    unset.append(slot.full_name)
        if unset:
            raise FcdpError(
                f"after the initialisation of their modules {_listed(unset)} not set, or not everywhere; set "
                "all of each in reset_parameters(), or give them values by load_pretrained or load_state_dict"
            )

    def _check_same(self) -> None:
        """Raise on every rank if ranks have made different values."""
        if not self._marks:
            return
        rows = self._state.collectives.agree(torch.stack(list(self._marks.values())).tolist())
        for name, marks in zip(self._marks, zip(*rows, strict=True), strict=True):
            if len(set(marks)) > 1:
                raise FcdpError(
                    f"ranks have initialised {name!r} differently: its initialisation depends on more than "
                    "torch's random numbers and the model; make it the same on every rank"
                )


def slots_of(root: nn.Module, state: ShardedModel) -> list[Slot]:
    """Every place of a parameter or buffer; of those that await values one gives them."""
    records = {place: r for r in state.records.values() for place in r.owners()}
    tied = tied_to_others(root)
    giving = set()
    for record in state.records.values():
        places = record.owners()
        giving.add(next((p for p in places if p not in tied), places[0]))
    buffers: dict[int, str] = {id(b): name for name, b in root.named_buffers()}
    slots = []
    seen: set[int] = set()
    for path, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            found = records.get((module, name))
            is_awaited = found is not None and found.spec.key in state.unset.keys
            slots.append(
                Slot(
                    module=module,
                    name=name,
                    original=parameter,
                    record=found,
                    is_buffer=False,
                    full_name=found.spec.name if found else f"{path}.{name}",
                    is_awaited=is_awaited,
                    gives=is_awaited and (module, name) in giving,
                )
            )
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            full_name = buffers[id(buffer)]
            is_awaited = full_name in state.unset.buffers
            slots.append(
                Slot(
                    module=module,
                    name=name,
                    original=buffer,
                    record=None,
                    is_buffer=True,
                    full_name=full_name,
                    is_awaited=is_awaited,
                    gives=is_awaited and id(buffer) not in seen,
                )
            )
            seen.add(id(buffer))
    return slots


@contextmanager
def _as_rank_0(state: ShardedModel) -> Iterator[None]:
    """Draw random numbers as rank 0 would; afterwards a rank that stood elsewhere stands there again."""
    device, group = state.device.torch, state.topology.control
    mine = generator_states(device)
    firsts = [s.clone() for s in mine]
    if group is not None:
        for generator in firsts:
            broadcast_first(generator, group, "rank 0's random numbers for all ranks")
    set_generators(firsts, device)
    try:
        yield
    except BaseException:
        set_generators(mine, device)
        raise
    for index, (own, first) in enumerate(zip(mine, firsts, strict=True)):
        if not torch.equal(own, first):
            now = generator_states(device)
            now[index] = own
            set_generators(now, device)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names)
    return f"{shown} is" if len(names) == 1 else f"{shown} are"
