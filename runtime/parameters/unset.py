"""Parameters and buffers that have memory but no values yet: their model was built on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fcdp_compile.errors import FcdpError
from fcdp_compile.runtime.collectives.collectives import Collectives


class Unset:
    """The parameters and buffers of a model that have no values yet.

    keys: the parameters' keys.  buffers: the buffers' names.
    A model that never was on meta costs nothing.  For other models, ranks compare what is unset until nothing
    is, because a single rank may have loaded a state dict.
    """

    def __init__(
        self, names: dict[str, str], buffers: Iterable[str], collectives: Collectives
    ) -> None:
        self._names = names
        self.keys = set(names)
        self._order = list(buffers)
        self.buffers = set(self._order)
        self._collectives = collectives
        self._is_settled = not (self.keys or self.buffers)

    def __bool__(self) -> bool:
        return bool(self.keys or self.buffers)

    def names(self) -> list[str]:
        """The names of all that has no values on this rank, in the model's order, parameters first."""
        of_parameters = [name for key, name in self._names.items() if key in self.keys]
        return of_parameters + [name for name in self._order if name in self.buffers]

    def arrived(self, keys: Iterable[str], buffers: Iterable[str] = ()) -> None:
        """Note that these have values now."""
        self.keys.difference_update(keys)
        self.buffers.difference_update(buffers)

    def refuse(self, what: str) -> None:
        """Raise on every rank if anything has no values on any rank; all ranks must call it.

        what: the act that would read the values.

        Raises: FcdpError.
        """
        if self._is_settled:
            return
        told = "the agreement on what has no values yet"
        counts = [row[0] for row in self._collectives.agree([len(self.names())], told)]
        if not any(counts):
            self._is_settled = True
            return
        if here := self.names():
            raise FcdpError(_told(what, here))
        rank = next(r for r, count in enumerate(counts) if count)
        raise FcdpError(
            f"{what} needs values that rank {rank} does not have yet ({counts[rank]} tensors of a model "
            "built on meta); load the same on every rank"
        )

    def refuse_here(self, what: str) -> None:
        """Raise if anything has no values on this rank; asks no other rank.

        Raises: FcdpError.
        """
        if here := self.names():
            raise FcdpError(_told(what, here))


def _told(what: str, names: Sequence[str]) -> str:
    others = "" if len(names) == 1 else f" (nor have {len(names) - 1} others)"
    return (
        f"{what} needs the values of {names[0]!r}, which was built on meta and has none yet{others}; call "
        "fcdp_compile.materialize(model), fcdp_compile.load_pretrained or model.load_state_dict (values "
        "that are written into a parameter by hand do not count)"
    )
