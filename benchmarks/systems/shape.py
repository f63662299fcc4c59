"""Sizes of the benchmark's model and batches, and numbers computed from them, without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

HEAD_WIDTH = 64
BYTES_PER_VALUE = 4  # everything is fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a GPT of layers x width; a rank's micro-batch is `batch` sequences of `length` tokens."""

    layers: int = 8
    width: int = 512
    vocabulary: int = 1536
    batch: int = 1
    length: int = 128

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"{field.name} must be at least 1, not {getattr(self, field.name)}"
                )
        if self.width % HEAD_WIDTH:
            raise ValueError(
                f"width {self.width} cannot be split into heads of {HEAD_WIDTH}; "
                f"pass a multiple of {HEAD_WIDTH}"
            )

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return self.width // HEAD_WIDTH

    @property
    def tokens(self) -> int:
        """Tokens of one rank's micro-batch."""
        return self.batch * self.length

    @property
    def approximate_bytes(self) -> int:
        """The size of the parameters, approximately; the worker reports the exact number."""
        per_layer = 12 * self.width**2 + 13 * self.width
        values = self.layers * per_layer + (2 * self.vocabulary + self.length + 2) * self.width
        return BYTES_PER_VALUE * values


QUICK = Shape(layers=2, width=320, vocabulary=96, batch=1, length=16)
"""For a trial.  A smaller width does not do: DeepSpeed does not shard tensors below 100,000 elements."""
