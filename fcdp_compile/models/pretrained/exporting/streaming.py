"""`stream_state`: the tensors that `save_pretrained` would write, in buckets, to be sent to other processes.

    home shards ── the bucket's sources, gathered one after the other ──▶ a twin, elsewhere on meta
    the twin    ── the library's own conversion or merge ───────────────▶ the bucket's tensors

A rank that fails or stops early tells the others, which wait for it after each bucket.

A piece is some tensors of the export and the tensors of the model that they are made of:

    stacked experts [E, F, d] ─▶ E tensors [F, d]          one piece: they have a common source
    a weight, lora_A, lora_B  ─▶ the merged weight         one piece
    any other weight          ─▶ itself, perhaps renamed   one piece

A library makes the tensors of a twin on meta, and the operations that it calls are recorded.  So the bucket's
pieces can be made later from their sources alone, with all other tensors on meta.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fcdp_compile.core.ranks.messages import first_other, together
from fcdp_compile.core.sharding.shard import model_of, state_of
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.models.pretrained.exporting.changes import ReceiverCopy, TensorChanges
from fcdp_compile.models.pretrained.exporting.copies import GatheredValues, ModelTensors
from fcdp_compile.models.pretrained.exporting.kinds import reader_of
from fcdp_compile.runtime.collectives.agreement import same_act
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.torch_compat import DispatchMode, OpOverload, tree_leaves
from fcdp_compile.torch_compat.tensors import storage_id

# Of what a bucket has for a name: `Tensor`, or `Tensor | TensorChanges`.
T = TypeVar("T")
Buckets = Generator[list[tuple[str, T]], None, None]


class StateStream(Generic[T]):
    """The buckets of `stream_state`, to go through once.

    Only the loop holds what it goes through, so that leaving it ends the stream, and tells the other ranks.
    """

    def __init__(self, stream: _Stream, copy: ReceiverCopy) -> None:
        self._stream, self._copy = stream, copy
        self._new: Buckets[T] | None = stream.buckets()
        self._begun = weakref.ref(self._new)

    def __iter__(self) -> Iterator[list[tuple[str, T]]]:
        new, self._new = self._new, None
        return new or self._begun() or iter(())

    def close(self) -> None:
        """Leave the stream; ranks that go on, or begin, raise an error.

        Before a loop over the stream has begun, every rank must call it, or begin.
        """
        if self._new is not None:
            self._new = None
            self._stream.decline()
        elif (begun := self._begun()) is not None:
            begun.close()

    def acknowledge(self) -> None:
        """Tell that the receiver has everything that this rank got: the base of the next `changes=True`.

        Ranks that do not ask may call it, too.  It does not communicate.

        Raises: FcdpError before the last bucket, for a stream without changes, and for any but the last.
        """
        self._copy.acknowledge(self._stream.state)


@overload
def stream_state(
    model: nn.Module,
    *,
    only: str = ...,
    on: Collection[int] = ...,
    bucket_bytes: int = ...,
    dtype: torch.dtype | None = ...,
    changes: Literal[False] = ...,
) -> StateStream[Tensor]: ...


@overload
def stream_state(
    model: nn.Module,
    *,
    only: str = ...,
    on: Collection[int] = ...,
    bucket_bytes: int = ...,
    dtype: torch.dtype | None = ...,
    changes: bool,
) -> StateStream[Tensor | TensorChanges]: ...


def stream_state(
    model: nn.Module,
    *,
    only: str = "all",
    on: Collection[int] = (0,),
    bucket_bytes: int = 10**9,
    dtype: torch.dtype | None = None,
    changes: bool = False,
) -> StateStream[Any]:
    """Yield the model's whole tensors with their names, one bucket after the other, for a rollout engine.

        for bucket in fcdp_compile.stream_state(model):
            engine.load_weights(bucket)

    Names, shapes and dtypes are those of the files that `save_pretrained` writes: a Transformers model gets
    the names of its checkpoint, any other module those of its state dict.  Every rank must call it and go
    through all buckets.  All ranks get equally many buckets; on ranks that do not ask, they are empty.
    The tensors are on the model's device, in memory that the caller may keep.  The list of a bucket is
    emptied when the next bucket is asked for, so that only one bucket is in memory.

    model: sharded, compiled or not.
    only: "adapters" for the tensors of a PEFT model's active adapter, by the names in PEFT's files, which
    lack the adapter's name; "all" for every parameter and persistent buffer, for a PEFT model of the base
    with the active adapters merged into it.  The model itself stays as it is.
    on: the ranks of the mesh that ask for tensors.
    bucket_bytes: the most bytes of a bucket, before the cast to `dtype`.  A larger tensor is a bucket of its
    own, and so are larger tensors that are made together, such as the experts that a model stacks.
    dtype: what floating tensors are cast to, such as the engine's; None: no cast.
    changes: yield `TensorChanges` instead of a tensor if they have fewer bytes and the receiver has the
    tensor of the last such stream: this rank asked for that stream too, and it was acknowledged
    (`StateStream.acknowledge`).  Otherwise the tensor is whole.  Streams without changes do not count, so do
    not load one into the receiver.  If the receiver has lost its tensors, `close` a stream on every rank.

    Memory: on every rank the largest parameter, on ranks that ask a bucket and what its tensors are made of.
    With changes, on ranks that ask, also a copy of all tensors in host memory, kept with the model.
    Bytes: every parameter crosses between nodes once, unless the cache has a valid and exact copy, as it has
    of frozen parameters after a step.  "adapters" gathers nothing else than the tensors in PEFT's files.

    Raises: ArgumentError on every rank for wrong arguments, or arguments that differ between ranks.
    FcdpError on every rank: if values were never loaded, parameters are whole in a block of
    `fcdp_compile.gathered`, the model has no adapters or adapters that cannot be merged, or the base is
    quantised ("adapters" works); and within the loop if an optimizer steps, or if a rank fails or leaves the
    loop while others go on.
    """
    root, state = model_of(model), state_of(model)
    _check_arguments(state, only, on, bucket_bytes, dtype, changes)
    same_act(state.collectives, "calls stream_state")
    state.unset.refuse("stream_state")
    copy = ReceiverCopy()
    kept = copy if changes else None
    stream = _agreed(
        state.topology.everyone,
        lambda: _Stream(root, state, only, on, bucket_bytes, dtype, kept),
    )
    if changes:
        copy.begin(state)
    return StateStream(stream, copy)


def _check_arguments(state: ShardedModel, *given: Any) -> None:
    """Check the arguments of `stream_state`.

    Raises: ArgumentError on every rank.
    """
    texts = together(state.topology.everyone, lambda: _checked(state, *given), ArgumentError)
    if other := first_other(texts):
        raise ArgumentError(
            f"ranks 0 and {other} ask fcdp_compile.stream_state for different things: {texts[0]} against "
            f"{texts[other]}; give every rank the same arguments"
        )


def _checked(
    state: ShardedModel,
    only: str,
    on: Collection[int],
    bucket_bytes: int,
    dtype: torch.dtype | None,
    changes: bool,
) -> str:
    """Return the arguments as a text, for ranks to compare.

    Raises: ArgumentError.
    """
    ranks = state.topology.ranks * state.topology.sharers
    if only not in ("adapters", "all"):
        raise ArgumentError(f"only must be 'adapters' or 'all', not {only!r}")
    if not isinstance(on, Collection) or not all(type(r) is int and 0 <= r < ranks for r in on):
        raise ArgumentError(f"on must hold ranks of the mesh, from 0 to {ranks - 1}, not {on!r}")
    if type(bucket_bytes) is not int or bucket_bytes < 1:
        raise ArgumentError(f"bucket_bytes must be a positive whole number, not {bucket_bytes!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"dtype must be a floating torch.dtype or None, not {dtype!r}")
    if type(changes) is not bool:
        raise ArgumentError(f"changes must be True or False, not {changes!r}")
    sizes = f"on={sorted(set(on))}, bucket_bytes={bucket_bytes}"
    return f"only={only!r}, {sizes}, dtype={dtype}, changes={changes}"


def _agreed(everyone: dist.ProcessGroup | None, make: Callable[[], _Stream]) -> _Stream:
    """Return this rank's stream.

    Raises: FcdpError on every rank if ranks would stream different tensors.
    """
    found: list[_Stream] = []

    def plan() -> str:
        found.append(make())
        return found[0].digest

    if other := first_other(together(everyone, plan)):
        raise FcdpError(
            f"ranks 0 and {other} are about to stream different tensors; call stream_state with the same "
            "model on every rank"
        )
    return found[0]


class _Stream:
    """One use of `stream_state`: decides which tensors each bucket has, without communication.

    copy: what the receiver has, for a stream of changes.  digest: of the decision.

    Raises: the errors of `stream_state`.
    """

    def __init__(
        self,
        root: nn.Module,
        state: ShardedModel,
        only: str,
        on: Collection[int],
        bucket_bytes: int,
        dtype: torch.dtype | None,
        copy: ReceiverCopy | None,
    ) -> None:
        self._dtype = dtype
        self.state, self._copy, everyone = state, copy, state.topology.everyone
        mine = 0 if everyone is None else dist.get_rank(everyone)
        self._values = GatheredValues(state, keeps=mine in on)
        if state.whole:
            raise FcdpError(
                "stream_state gathers parameters that a block of fcdp_compile.gathered has gathered already; "
                "leave the block first"
            )
        self._read: Callable[[nn.Module], dict[str, Tensor]] = reader_of(root, only=only)
        self._copies = ModelTensors(root, state)
        try:
            with torch.no_grad():
                self._plan = in_buckets(self._copies, self._read, bucket_bytes)
        except NotImplementedError as error:
            # An operation that needs values, such as PEFT's on prompt encoders.
            raise FcdpError(
                f"{type(root).__name__} cannot be streamed, because its library computes tensors to "
                f"save from values ({error}); write it with fcdp_compile.save_pretrained"
            ) from error
        text = f"{self._copies.describe(self._copies.names())}\n{self._plan}"
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def buckets(self) -> Buckets[Any]:
        """Yield the buckets."""
        steps = self.state.counters.steps
        for piece in self._plan:
            self._agree(piece.sources, steps)
            with torch.no_grad():
                for name in piece.sources:
                    self._copies.fetch(name, self._values)
            try:
                bucket = self._made(piece)
                yield bucket
                bucket.clear()
            except GeneratorExit:
                self._tell(
                    "left the loop over fcdp_compile.stream_state before its end; let every rank go through "
                    "all buckets"
                )
                raise
            except BaseException as error:
                self._tell(f"fcdp_compile.stream_state failed: {error}")
                raise
        self._agree((), steps)
        if self._copy is not None:
            self._copy.end()

    def _agree(self, sources: Sequence[str], steps: int) -> None:
        """Wait for all ranks, and raise on every rank if any rank cannot go on."""

        def check() -> bool:
            if self.state.counters.steps != steps:
                raise FcdpError(
                    "an optimizer has stepped within the loop over fcdp_compile.stream_state, so later "
                    "buckets would have newer values; finish the loop first"
                )
            self._copies.check(sources)
            return False

        if any(together(self.state.topology.everyone, check)):
            raise FcdpError(
                "other ranks closed a stream of fcdp_compile.stream_state before its first bucket; let every "
                "rank go through all buckets, or close the stream"
            )

    def decline(self) -> None:
        """Tell ranks that go on, at their first bucket, that this rank does not."""
        together(self.state.topology.everyone, lambda: True)

    def _made(self, piece: Piece) -> list[tuple[str, Any]]:
        """Return the tensors of a bucket, on this rank's device; none on a rank that does not ask."""
        self._values.check()
        if not self._values.keeps:
            return []
        with torch.no_grad():
            tensors = self._read(self._copies.twin())
            self._copies.forget()
            made = [(n, self._cast(tensors[n]).contiguous()) for n in piece.names]
            return made if self._copy is None else [(n, self._copy.update(n, t)) for n, t in made]

    def _cast(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else None
        return tensor.to(device=self._values.device, dtype=dtype)

    def _tell(self, problem: str) -> None:
        """Make the other ranks, which wait in `_agree`, raise because of this rank's problem."""

        def raise_it() -> None:
            raise FcdpError(problem)

        everyone = self.state.topology.everyone
        # An abandoned generator may end after the process groups.
        if everyone is not None and dist.is_initialized():
            with suppress(FcdpError):
                together(everyone, raise_it)


@dataclass(slots=True, eq=False)
class Piece:
    """Tensors of an export that can be made together, without any other tensor of the model.

    sources: names of the model's tensors that they are made of.  names: their own.
    """

    sources: list[str]
    names: list[str]


def in_buckets(
    copies: ModelTensors, read: Callable[[nn.Module], dict[str, Tensor]], bucket_bytes: int
) -> list[Piece]:
    """Return the tensors of an export in buckets, in the export's order.

    read: returns the export's tensors of a twin.  bucket_bytes: a bucket is larger only if it is one piece.
    """
    twin = copies.twin()
    with _Sources(copies.names_on_meta) as sources:
        tensors = read(twin)
    order = {name: i for i, name in enumerate(copies.names())}
    buckets: list[Piece] = []
    size = 0
    for piece in _pieces({name: sources.of(tensor) for name, tensor in tensors.items()}):
        more = sum(tensors[name].nbytes for name in piece.names)
        if not buckets or size + more > bucket_bytes:
            buckets.append(Piece([], []))
            size = 0
        buckets[-1].sources += piece.sources
        buckets[-1].names += piece.names
        size += more
    for bucket in buckets:
        bucket.sources = sorted(set(bucket.sources), key=order.__getitem__)
    return buckets


def _pieces(sources: Mapping[str, Iterable[str]]) -> list[Piece]:
    """Put names with a common source together, in the order of the first name of each piece.

    sources: by name.
    """
    found: dict[Piece, None] = {}
    of: dict[str, Piece] = {}
    for name, own in sources.items():
        known = list(dict.fromkeys(of[source] for source in sorted(own) if source in of))
        piece, *others = known or [Piece([], [])]
        for other in others:
            piece.sources += other.sources
            piece.names += other.names
            del found[other]
        piece.sources = sorted({*piece.sources, *own})
        piece.names.append(name)
        found[piece] = None
        of |= dict.fromkeys(piece.sources, piece)
    return list(found)


class _Sources(DispatchMode):
    """Records, for every tensor that an operation returns or changes, the named tensors it is made of.

    names: of the tensors that exist already, by `storage_id`.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._of = {storage: frozenset([name]) for storage, name in names.items()}
        # Without it, a later storage could get the number of one that is gone.
        self._kept: list[Any] = []

    def of(self, tensor: Tensor) -> frozenset[str]:
        """The names of the tensors that a tensor is made of."""
        return self._of.get(storage_id(tensor), frozenset())

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = _tensors((args, kwargs)), _tensors(result)
        found = frozenset().union(*(self.of(tensor) for tensor in given))
        changed = given if func._schema.is_mutable else []
        self._of |= {storage_id(tensor): found for tensor in (*made, *changed)}
        self._kept.append(made)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
