"""`materialize(model)`: give a model that was built on meta the values that its own modules give it.

Module by module: whole tensors on the device, the module's initialisation, this rank's rows kept, the rest
freed.  So no rank ever has more than its home shards and the largest module.

[Note: again] An initialisation first gets whole tensors for the parameters of its own module.  Some need
more: PEFT's write to modules below and read the base's weights, torch's MultiheadAttention writes to a child.
Such a run touches stand-ins.  It is thrown away, and the initialisation runs again from the same random
numbers, with whole tensors for what it touched, and with values for what it read.
"""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fcdp_compile.deferred.initialisation import Step, lost_attributes, steps_of, tied_to_others
from fcdp_compile.deferred.stand_ins import (
    Resting,
    Slot,
    Touch,
    Watch,
    generator_states,
    has_unset,
    set_generators,
    standing_in,
)
from fcdp_compile.errors import FcdpError
from fcdp_compile.params.fingerprint import fingerprint
from fcdp_compile.params.home_shard import rows_of
from fcdp_compile.ranks.all_or_none import together
from fcdp_compile.ranks.differences import first_other
from fcdp_compile.ranks.messages import broadcast_first
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.sharding.shard import model_of, state_of
from fcdp_compile.torch_compat import storage_id


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

    Raises: FcdpError on every rank, with everything still without values: for parameters and buffers without
    any initialisation, all of them named; if an initialisation fails, leaves a parameter partly unset, or
    gave other values on another rank.  ValueError for a model that is not sharded.
    """
    root, state = model_of(model), state_of(model)
    with torch.device("cpu"):  # also within `with torch.device("meta")`
        _agree_on_unset(state)
        if state.unset:
            _Materialisation(root, state).run()


def _agree_on_unset(state: ShardedModel) -> None:
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
        self._slots_of: dict[nn.Module, list[Slot]] = {}
        for slot in self._slots:
            self._slots_of.setdefault(slot.module, []).append(slot)
        # Buffers by name as they will be; they stay out of the model until everything has worked.
        self._buffers: dict[str, Tensor] = {
            s.full_name: s.blank(self._device)
            for s in self._slots
            if s.is_buffer and s.gives and not s.original.numel()
        }
        self._written: set[str] = set()
        self._marks: dict[str, Tensor] = {}
        self._failure: FcdpError | None = None

    def run(self) -> None:
        """Initialise everything that is unset."""
        control = self._state.topology.control
        steps: list[Step] = []
        together(control, lambda: steps.extend(self._steps()))
        with standing_in(self._slots, self._device) as resting, _as_rank_0(self._state):
            for step in steps:
                if self._failure is None:
                    self._initialise(step, resting)
            self._meet("has done the last one")
            together(control, self._check_set)
            self._check_same()
        for slot in self._slots:
            if slot.is_buffer and slot.is_unset:
                slot.held[slot.name] = self._buffers[slot.full_name]
        unset = self._state.unset
        self._state.validity.values_arrived(list(unset.keys), list(unset.buffers))

    def _steps(self) -> list[Step]:
        if lost := lost_attributes(self._root):
            raise FcdpError(
                f"{_listed(lost)} on meta and neither a parameter nor a buffer, so nothing would give values;"
                " register a buffer, or make it from numbers in forward"
            )
        return steps_of(self._root)

    # --- one initialisation -------------------------------------------------------------------------------

    def _initialise(self, step: Step, resting: Resting) -> None:
        """Run an initialisation until it has all that it touches ([Note: again])."""
        if not any(slot.is_unset for slot in self._below(step.module)):
            return
        start = generator_states(self._device)
        # The slots that get whole tensors, and whether these have values.
        whole = {s: False for s in self._slots_of.get(step.module, ()) if s.is_unset}
        while self._failure is None:
            values = self._gathered(whole)
            try:
                touches, error = self._attempt(step, whole, values, resting)
                lacking = self._lacking(touches, whole)
                is_needed = any(t.writes and slot.is_unset for slot, t in touches.items())
                if error is None and is_needed and not lacking:
                    self._keep(touches)
                    return
            except Exception as raised:
                error, lacking = raised, {}
            finally:
                for slot in whole:
                    slot.held[slot.name] = slot.resting
            set_generators(start, self._device)
            if error is None and not is_needed:
                return
            if not lacking:
                # Whatever it is, the others have to hear of it before they wait for this rank.
                self._failure = FcdpError(f"{step.what} failed: {error}")
            whole |= lacking

    def _attempt(
        self,
        step: Step,
        whole: dict[Slot, bool],
        values: dict[Slot, Tensor],
        resting: Resting,
    ) -> tuple[dict[Slot, Touch], Exception | None]:
        """What an initialisation touches, and why it failed; what it has set is in its slots."""
        put = {}
        for slot in whole:
            slot.held[slot.name] = slot.wrap(self._whole(slot, values))
            put[storage_id(slot.held[slot.name])] = slot
        values.clear()
        error: Exception | None = None
        watch = Watch(ChainMap(put, resting.slots))
        try:
            with torch.no_grad(), self._device, watch:
                step.act()
        except Exception as raised:  # it may have looked at the values of a stand-in
            error = raised.with_traceback(None)  # whose frames would keep tensors alive
        for slot in self._below(step.module):
            if watch.slot_of(slot.held.get(slot.name)) is not slot:
                # Another tensor was put there, or other memory into it (`.data = ...`).
                watch.touches.setdefault(slot, Touch(needs_values=False)).writes = True
                if slot not in whole:
                    resting.renew(slot)
        return watch.touches, error

    def _below(self, module: nn.Module) -> Iterator[Slot]:
        return (slot for m in module.modules() for slot in self._slots_of.get(m, ()))

    def _lacking(self, touches: dict[Slot, Touch], whole: dict[Slot, bool]) -> dict[Slot, bool]:
        """Of what was touched, the slots without a whole tensor or without values that were read."""
        lacking = {}
        for slot, touch in touches.items():
            has_values = not slot.is_unset or slot.full_name in self._written
            needs_values = touch.needs_values and has_values and slot.record is not None
            if slot not in whole or (needs_values and not whole[slot]):
                lacking[slot] = needs_values
        return lacking

    def _gathered(self, whole: dict[Slot, bool]) -> dict[Slot, Tensor]:
        """The values of slots that need them, with all ranks."""
        wanted = [slot for slot, needs_values in whole.items() if needs_values]
        if wanted:
            self._meet(f"reads {', '.join(slot.full_name for slot in wanted)}")
        found = {}
        for slot in wanted:
            assert slot.record is not None, "buffers are whole on every rank"
            spec = slot.record.spec
            local = slot.record.local_of(slot.original)
            found[slot] = self._state.gather(spec.key, local, spec.home_dtype)
        return found

    def _whole(self, slot: Slot, values: dict[Slot, Tensor]) -> Tensor:
        if slot in values:
            return values[slot]
        if slot.record is None:
            if slot.full_name in self._buffers:
                return self._buffers[slot.full_name].clone()
            if not slot.is_unset:
                return slot.original.detach().clone()
        return slot.blank(self._device)

    def _keep(self, touches: dict[Slot, Touch]) -> None:
        """Keep this rank's rows of what an initialisation has set."""
        for slot, touch in touches.items():
            if not (slot.gives and touch.writes):
                continue
            whole = slot.held[slot.name].detach()
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

    def _meet(self, doing: str) -> None:
        """Raise on every rank if an initialisation has failed on any, or if ranks are at different ones."""

        def told() -> str:
            if self._failure is not None:
                raise self._failure
            return doing

        texts = together(self._state.topology.control, told)
        if other := first_other(texts):
            raise FcdpError(
                f"an initialisation {texts[0]} on rank 0 and {texts[other]} on rank {other}: it depends on "
                "more than torch's random numbers and the model; make it the same on every rank"
            )

    def _check_set(self) -> None:
        """Raise if something has no initialisation, or if one left something unset."""
        giving = [slot for slot in self._slots if slot.gives and slot.original.numel()]
        if lacking := [slot for slot in giving if slot.full_name not in self._written]:
            names = [f"{slot.full_name} ({type(slot.module).__name__})" for slot in lacking]
            raise FcdpError(
                f"{_listed(names)} without an initialisation; give the class reset_parameters() that sets"
                " all parameters and buffers, or give them values by load_pretrained or load_state_dict"
            )
        unset = []
        for slot in giving:
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
    """Every place of a parameter or buffer; of the places of what is unset one gives values."""
    records = {place: r for r in state.records.values() for place in r.owners()}
    tied = tied_to_others(root)
    giving = set()
    for each in state.records.values():
        places = each.owners()
        giving.add(next((p for p in places if p not in tied), places[0]))
    buffers: dict[int, str] = {id(b): name for name, b in root.named_buffers()}
    slots = []
    seen: set[int] = set()
    for path, module in root.named_modules():
        held = [(False, n, t) for n, t in module._parameters.items() if t is not None]
        held += [(True, n, t) for n, t in module._buffers.items() if t is not None]
        for is_buffer, name, tensor in held:
            record = None if is_buffer else records.get((module, name))
            if is_buffer:
                full_name = buffers[id(tensor)]
                is_unset = full_name in state.unset.buffers
                is_first = id(tensor) not in seen
            else:
                full_name = record.spec.name if record else f"{path}.{name}"
                is_unset = record is not None and record.spec.key in state.unset.keys
                is_first = (module, name) in giving
            slots.append(
                Slot(
                    module=module,
                    name=name,
                    original=tensor,
                    record=record,
                    is_buffer=is_buffer,
                    full_name=full_name,
                    is_unset=is_unset,
                    gives=is_unset and is_first,
                )
            )
            seen.add(id(tensor))
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
