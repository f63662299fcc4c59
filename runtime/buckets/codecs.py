"""The codecs of a bucket; each is made once."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from fcdp_compile.plan import Bucket
from fcdp_compile.runtime.collectives.quantize import Codec
from fcdp_compile.strategy.formats import Format


class Codecs:
    """The codecs of one bucket's weights, and of the gradients of some or all of its parameters."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._of_gradients: dict[tuple[str, ...], Codec | None] = {}

    @cached_property
    def of_weights(self) -> Codec | None:
        """The codec of the weights between nodes; None if they are sent unchanged."""
        return self._made(self._bucket.wire, [p.name for p in self._bucket.params])

    def of_gradients(self, params: tuple[str, ...]) -> Codec | None:
        """The codec of these parameters' gradients between nodes; None if they are sent unchanged."""
        if params not in self._of_gradients:
            self._of_gradients[params] = self._made(self._bucket.reduce_wire, params)
        return self._of_gradients[params]

    def made(self) -> list[Codec]:
        """All codecs made so far."""
        found = [self.__dict__.get("of_weights"), *self._of_gradients.values()]
        return [codec for codec in found if codec is not None]

    def _made(self, wire: Format, params: Collection[str]) -> Codec | None:
        slots = [p.layout.slot_elements for p in self._bucket.params if p.name in params]
        return None if wire is Format.FULL else Codec(wire, slots)
