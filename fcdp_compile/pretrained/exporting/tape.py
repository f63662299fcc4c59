"""What others compute from a model's tensors, noted first and done later, when the tensors are at hand.

    Transformers' and PEFT's own functions ── on meta tensors, under a Tape ──▶ what their files will hold
    whole parameters, one at a time        ── Evaluation ──────────────────▶ the same, with values

So an exported file has the names and values that their `save_pretrained` would give it, while no rank ever
has a whole model.

[Note: by storage] A tensor is known by its storage and where in that it lies: tensors of one storage are
views of what one operation made, or of one leaf.  Views need no notes, and objects no identity.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fcdp_compile.errors import FcdpError
from fcdp_compile.files.safetensors_writer import TensorMeta
from fcdp_compile.torch_compat import DispatchMode, storage_id, tree_leaves, tree_map_only

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """One operation; output: which of the things that it gives, made: that thing, without values."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int
    made: Tensor


class Tape(DispatchMode, Generic[S]):
    """Notes the operations on its leaves, which are meta tensors, while it is entered.

    S: what a leaf stands for.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the mode's has no types
        self._leaves: dict[int, S] = {}
        self._steps: dict[int, _Step] = {}
        # Of the leaves: while they live nobody else gets their numbers.
        self._metas: dict[int, Tensor] = {}

    def leaf(self, source: S, meta: TensorMeta) -> Tensor:
        """A meta tensor that stands for `source`."""
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        self._leaves[storage_id(tensor)] = source
        self._metas[storage_id(tensor)] = tensor
        return tensor

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is a leaf, a view of one, or made of some."""
        return storage_id(tensor) in self._leaves or storage_id(tensor) in self._steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not any(self.knows(t) for t in inputs):
            result = func(*args, **kwargs)
            if any(t.is_meta for t in inputs):
                return result
            # What is made or moved where the leaves are goes where they will be when they have values.
            return self._noted(func, args, kwargs, result)
        if func._schema.is_mutable:
            raise FcdpError(
                f"{func} writes to a tensor of the model while its export is being prepared, which fcdp "
                "cannot put off until the values are there"
            )
        if "device" in kwargs:  # moving to the CPU, where the values will be
            kwargs["device"] = torch.device("meta")
        result = func(*args, **kwargs)
        return self._noted(func, args, kwargs, result)

    def _noted(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        for index, tensor in enumerate(tree_leaves(result)):
            if isinstance(tensor, Tensor) and tensor.is_meta and not self.knows(tensor):
                self._steps[storage_id(tensor)] = _Step(
                    function=func, args=args, kwargs=kwargs, output=index, made=tensor
                )
        return result

    def needs(self, tensor: Tensor) -> list[int]:
        """The storages that a tensor is made of, each after those that it is made of itself."""
        found: dict[int, None] = {}

        def visit(storage: int) -> None:
            if storage in found or not (storage in self._leaves or storage in self._steps):
                return
            if (step := self._steps.get(storage)) is not None:
                for value in tree_leaves((step.args, step.kwargs)):
                    if isinstance(value, Tensor):
                        visit(storage_id(value))
            found[storage] = None

        visit(storage_id(tensor))
        return list(found)

    def source(self, storage: int) -> S | None:
        """What a storage stands for; None for what an operation made."""
        return self._leaves.get(storage)

    def meta(self, storage: int) -> Tensor:
        """The meta tensor of a leaf."""
        return self._metas[storage]

    def step(self, storage: int) -> _Step:
        """The operation that made a storage."""
        return self._steps[storage]


class Evaluation(Generic[S]):
    """Gives the tensors of a tape their values, in an order in which those that share inputs are neighbours.

    fetch: the whole value of a leaf on the CPU, None on ranks that get none.  Every rank asks for the same
    leaves in the same order; what the last tensor needed is kept for the next one, and nothing else.
    """

    def __init__(self, tape: Tape[S], fetch: Callable[[S], Tensor | None]) -> None:
        self._tape = tape
        self._fetch = fetch
        self._values: dict[int, Tensor | None] = {}

    def fetch(self, tensor: Tensor) -> None:
        """Get the leaves that a tensor is made of; every rank must call it."""
        needed = self._tape.needs(tensor)
        self._values = {s: v for s, v in self._values.items() if s in needed}
        for storage in needed:
            source = self._tape.source(storage)
            if source is not None and storage not in self._values:
                value = self._fetch(source)
                self._values[storage] = (
                    None if value is None else _as_laid_out(value, self._tape.meta(storage))
                )

    def value(self, tensor: Tensor) -> Tensor:
        """The value of a tensor whose leaves have been fetched."""
        for storage in self._tape.needs(tensor):
            if self._tape.source(storage) is None and storage not in self._values:
                self._values[storage] = self._made(self._tape.step(storage))
        return self._view(tensor)

    def _made(self, step: _Step) -> Tensor:
        args, kwargs = tree_map_only(Tensor, self._view, (step.args, step.kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        made: Tensor = tree_leaves(step.function(*args, **kwargs))[step.output]
        return _as_laid_out(made, step.made)

    def _view(self, tensor: Tensor) -> Tensor:
        if not self._tape.knows(tensor):
            return tensor
        value = self._values[storage_id(tensor)]
        assert value is not None, "a value was asked for that was not fetched"
        return torch.empty(0, dtype=tensor.dtype, device=value.device).set_(
            value.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )


def _as_laid_out(value: Tensor, meta: Tensor) -> Tensor:
    """A value that lies in a storage of its own as its meta tensor does ([Note: by storage])."""
    if value.stride() == meta.stride() and value.storage_offset() == 0:
        return value
    return torch.empty_strided(
        meta.shape, meta.stride(), dtype=value.dtype, device=value.device
    ).copy_(value)


def metas_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorMeta]:
    """What a file says of these tensors."""
    return {n: TensorMeta(dtype=t.dtype, shape=tuple(t.shape)) for n, t in tensors.items()}
