"""The codecs of a model's buckets; each is made once."""

from __future__ import annotations

from collections.abc import Iterable

from fcdp_compile.plan import Bucket
from fcdp_compile.runtime.collectives.quantize import Codec
from fcdp_compile.strategy.formats import Format


class Codecs:
    """A codec for each bucket and selection of its parameters; steps ask for it every time."""

    def __init__(self) -> None:
        self._made: dict[tuple[Format, int, tuple[str, ...] | None], Codec] = {}

    def of_weights(self, bucket: Bucket) -> Codec | None:
        """The codec of the bucket's weights between nodes; None if they are sent unchanged."""
        return self._of(bucket.wire, bucket, None)

    def of_gradients(self, bucket: Bucket, params: tuple[str, ...]) -> Codec | None:
        """The codec of these parameters' gradients between nodes; None if they are sent unchanged."""
        return self._of(bucket.reduce_wire, bucket, params)

    def made(self) -> Iterable[Codec]:
        """All codecs made so far."""
        return self._made.values()

    def _of(self, wire: Format, bucket: Bucket, params: tuple[str, ...] | None) -> Codec | None:
        if wire is Format.FULL:
            return None
        key = wire, bucket.id, params
        if key not in self._made:
            slots = {p.name: p.layout.slot_elements for p in bucket.params}
            self._made[key] = Codec(wire, [slots[n] for n in params or slots])
        return self._made[key]
