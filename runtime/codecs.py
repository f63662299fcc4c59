"""The codecs of a model's buckets, made once each."""

from __future__ import annotations

from collections.abc import Sequence

from fcdp_compile.plan import Bucket
from fcdp_compile.quantize import Codec
from fcdp_compile.wire import Format


class Codecs:
    """Codecs by format and slots: buckets of equal layers share one."""

    def __init__(self) -> None:
        self._made: dict[tuple[Format, tuple[int, ...]], Codec] = {}

    def of_weights(self, bucket: Bucket) -> Codec | None:
        """For a slot of a bucket's parameters between nodes; None if it crosses as it is."""
        return self._of(bucket.wire, [p.layout.slot_elements for p in bucket.params])

    def of_gradients(self, bucket: Bucket, params: Sequence[str]) -> Codec | None:
        """For a slot of gradients of these of its parameters; None if they cross as they are."""
        slots = {p.name: p.layout.slot_elements for p in bucket.params}
        return self._of(bucket.reduce_wire, [slots[n] for n in params])

    def _of(self, wire: Format, slots: list[int]) -> Codec | None:
        if wire is Format.FULL:
            return None
        key = wire, tuple(slots)
        if key not in self._made:
            self._made[key] = Codec(*key)
        return self._made[key]
