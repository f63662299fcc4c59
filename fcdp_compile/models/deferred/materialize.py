"""`materialize(model)`: initialise a model that was built on meta by its own modules' initialisation.

For each module: make whole tensors on the device, run the module's initialisation, keep this rank's rows and
free the rest.  So no rank ever holds more than its home shards and the largest module.

[Note: again] An initialisation first gets whole tensors for the parameters of its own module.  Some need
more: PEFT's write to modules below and read the base's weights, torch's MultiheadAttention writes to a child.
Such a run touches stand-ins.  Its results are thrown away, and the initialisation runs again from the same
random state, with whole tensors for the slots that it touched, and with values for those that it read.
"""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fcdp_compile.core.params.inner_cut import whole_of
from fcdp_compile.core.params.packing import take_boxes
from fcdp_compile.core.params.seals import fingerprint
from fcdp_compile.core.ranks.messages import broadcast_first, first_other, together
from fcdp_compile.core.sharding.shard import model_of, state_of
from fcdp_compile.errors import FcdpError
from fcdp_compile.models.deferred.initialisation import (
    Step,
    lost_attributes,
    steps_of,
    tied_to_others,
)
from fcdp_compile.models.deferred.stand_ins import (
    Resting,
    Slot,
    Touch,
    Watch,
    generator_states,
    has_unset,
    set_generators,
    standing_in,
)
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.torch_compat.tensors import storage_id


def materialize(model: nn.Module) -> None:
    """Initialise the tensors that were built on meta, by the modules' own initialisation; in place.

    It calls `reset_parameters()` of each module, `_init_weights` of a Hugging Face model and PEFT's methods
    for adapters, in the order of an ordinary build.  Every rank draws every whole parameter with the state of
    rank 0's random number generators, and keeps its own rows.  So the values are, bit for bit, those of an
    unsharded build on the same device (`with torch.device(device):`) after the same seed, on any number of
    ranks and with any strategy, if modules draw only in these methods.  (Modules that draw elsewhere in their
    constructor, such as Hugging Face's GPT-2, get other values of the same distribution; so do adapters of
    PEFT for a bf16 or fp16 base, which an ordinary build rounds to its dtype.)  Buffers are filled too.
    Tied parameters get the values of the first, or of the one that a Hugging Face model ties the others to.

    Tensors that have values keep them: after `load_pretrained`, or if only the adapters were built on meta.
    If nothing is on meta, nothing is done.  All ranks must call it.

    Afterwards the generators have the state that an unsharded build leaves on rank 0; a generator whose state
    differed from rank 0's gets its old state back.  The device's memory holds at most the home shards and the
    tensors that the largest initialisation touches: mostly one module's parameters.

    Raises: FcdpError on every rank, and everything stays without values: if parameters or buffers have no
    initialisation (the error names all of these), or if an initialisation fails, leaves a parameter partly
    unset, or gives other values on another rank.  ValueError if the model is not sharded.
    """
    root, state = model_of(model), state_of(model)
    with torch.device("cpu"):  # also within `with torch.device("meta")`
        _agree_on_unset(state)
        if state.unset:
            _refuse_quantised(state)
            _Materialisation(root, state).run()


def _refuse_quantised(state: ShardedModel) -> None:
    for key, record in state.records.items():
        if key in state.unset.keys and record.spec.is_packed:
            raise FcdpError(
                f"{record.spec.name!r} is a part of a quantised weight, which has no initialisation; call "
                "fcdp_compile.load_pretrained before fcdp_compile.materialize"
            )


def _agree_on_unset(state: ShardedModel) -> None:
    """Raise on every rank if different tensors have values on different ranks."""
    names = state.unset.names()
    mark = int(hashlib.sha256("\n".join(names).encode()).hexdigest()[:15], 16)
    rows = state.collectives.agree([mark], group=state.topology.everyone)
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
        # The future buffers by name; they are put into the model only after everything has succeeded.
        self._buffers: dict[str, Tensor] = {
            s.full_name: s.blank(self._device)
            for s in self._slots
            if s.is_buffer and s.gives and not s.original.numel()
        }
        self._written: set[str] = set()
        self._marks: dict[str, Tensor] = {}
        self._failure: FcdpError | None = None

    def run(self) -> None:
        """Initialise all unset parameters and buffers."""
        everyone = self._state.topology.everyone
        steps: list[Step] = []
        together(everyone, lambda: steps.extend(self._steps()))
        with standing_in(self._slots, self._device) as resting, _as_rank_0(self._state):
            for step in steps:
                if self._failure is None:
                    self._initialise(step, resting)
            self._meet("all are done")
            together(everyone, self._check_set)
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
        """Run an initialisation until it has whole tensors for all that it touches ([Note: again])."""
        if not any(slot.is_unset for slot in self._below(step.module)):
            return
        start = generator_states(self._device)
        # The slots that get whole tensors, and whether these tensors have values.
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
            # Initialisations are the user's and may raise anything; the other ranks must learn of it.
            except Exception as raised:
                error, lacking = raised, {}
            finally:
                for slot in whole:
                    slot.held[slot.name] = slot.resting
            set_generators(start, self._device)
            if error is None and not is_needed:
                return
            if not lacking:
                self._failure = FcdpError(f"{step.what} failed: {error}")
            whole |= lacking

    def _attempt(
        self, step: Step, whole: dict[Slot, bool], values: dict[Slot, Tensor], resting: Resting
    ) -> tuple[dict[Slot, Touch], Exception | None]:
        """Run an initialisation; returns the slots that it touched, and its error.  Slots keep its values."""
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
        except Exception as raised:  # the user's code may raise anything, also over a stand-in
            error = raised.with_traceback(None)  # frames of a traceback would keep tensors alive
        for slot in self._below(step.module):
            if watch.slot_of(slot.held.get(slot.name)) is not slot:
                # The initialisation has put another tensor there, or other memory into it (`.data = ...`).
                watch.touches.setdefault(slot, Touch(needs_values=False)).writes = True
                if slot not in whole:
                    resting.renew(slot)
        return watch.touches, error

    def _below(self, module: nn.Module) -> Iterator[Slot]:
        return (slot for m in module.modules() for slot in self._slots_of.get(m, ()))

    def _lacking(self, touches: dict[Slot, Touch], whole: dict[Slot, bool]) -> dict[Slot, bool]:
        """The touched slots that had no whole tensor, or no values though these were read."""
        lacking = {}
        for slot, touch in touches.items():
            has_values = not slot.is_unset or slot.full_name in self._written
            needs_values = touch.needs_values and has_values and slot.record is not None
            if slot not in whole or (needs_values and not whole[slot]):
                lacking[slot] = needs_values
        return lacking

    def _gathered(self, whole: dict[Slot, bool]) -> dict[Slot, Tensor]:
        """Gather the values of the slots that need them; all ranks take part."""
        wanted = [slot for slot, needs_values in whole.items() if needs_values]
        if wanted:
            self._meet(f"reads {', '.join(slot.full_name for slot in wanted)}")
        found = {}
        for slot in wanted:
            assert slot.record is not None, "buffers are whole on every rank"
            spec = slot.record.spec
            local = slot.record.peek(slot.original)
            part = self._state.gather(spec.key, local, spec.home_dtype)
            found[slot] = whole_of(part, spec.inner, self._state.topology.tp)
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
        """Keep this rank's rows of the values that an initialisation has set."""
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
                local = slot.record.to_fill(slot.original)
                take_boxes(local, whole, spec.boxes(where.node, where.place))
            self._written.add(slot.full_name)
            if self._state.topology.everyone is not None:
                self._marks[slot.full_name] = fingerprint([whole])

    # --- agreement of ranks -------------------------------------------------------------------------------

    def _meet(self, doing: str) -> None:
        """Raise on every rank if an initialisation failed on any rank, or if ranks are at different steps."""

        def told() -> str:
            if self._failure is not None:
                raise self._failure
            return doing

        texts = together(self._state.topology.everyone, told)
        if other := first_other(texts):
            raise FcdpError(
                f"ranks run different initialisations (rank 0: {texts[0]}, rank {other}: {texts[other]}), "
                "which depend on more than torch's random numbers and the model; make them the same on every "
                "rank"
            )

    def _check_set(self) -> None:
        """Raise if a tensor has no initialisation, or if an initialisation left a tensor partly unset."""
        giving = [slot for slot in self._slots if slot.gives and slot.original.numel()]
        if lacking := [slot for slot in giving if slot.full_name not in self._written]:
            names = [f"{slot.full_name} ({type(slot.module).__name__})" for slot in lacking]
            raise FcdpError(
                f"{_listed(names)} without an initialisation; give the class reset_parameters() that sets"
                " all parameters and buffers, or give them values by load_pretrained or load_state_dict"
            )
        if unset := [slot.full_name for slot in giving if has_unset(self._set(slot))]:
            raise FcdpError(
                f"after the initialisation of their modules {_listed(unset)} not set, or not everywhere; set "
                "all of each in reset_parameters(), or give them values by load_pretrained or load_state_dict"
            )

    def _set(self, slot: Slot) -> Tensor:
        """The values that a slot has got: this rank's rows of a parameter, or a whole buffer."""
        if slot.record is None:
            return self._buffers[slot.full_name]
        return slot.record.peek(slot.original)

    def _check_same(self) -> None:
        """Raise on every rank if ranks have initialised different values."""
        if not self._marks:
            return
        marks = torch.stack(list(self._marks.values())).tolist()
        rows = self._state.collectives.agree(marks, group=self._state.topology.everyone)
        for name, found in zip(self._marks, zip(*rows, strict=True), strict=True):
            if len(set(found)) > 1:
                raise FcdpError(
                    f"ranks have initialised {name!r} differently: its initialisation depends on more than "
                    "torch's random numbers and the model; make it the same on every rank"
                )


def slots_of(root: nn.Module, state: ShardedModel) -> list[Slot]:
    """A slot for every place of a parameter or buffer; one place of each unset tensor gives its values."""
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
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            if (record := records.get((module, name))) is not None:
                full_name, is_unset = record.spec.name, record.spec.key in state.unset.keys
                is_first = (module, name) in giving
            else:
                full_name = buffers.get(id(tensor), f"{path}.{name}")
                is_unset = full_name in state.unset.buffers
                is_first = id(tensor) not in seen
            slot = Slot(
                module=module,
                name=name,
                original=tensor,
                record=record,
                full_name=full_name,
                is_unset=is_unset,
                gives=is_unset and is_first,
            )
            slots.append(slot)
            seen.add(id(tensor))
    return slots


@contextmanager
def _as_rank_0(state: ShardedModel) -> Iterator[None]:
    """Draw random numbers as rank 0 would; afterwards generators that differed get their old state back."""
    device, group = state.device.torch, state.topology.everyone
    mine = generator_states(device)
    firsts = [s.clone() for s in mine]
    if group is not None:
        doing = "rank 0's random numbers for all ranks"
        for generator in firsts:
            broadcast_first(generator, group, lambda: doing)
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
