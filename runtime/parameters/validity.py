"""Which values a gathered copy belongs to: generations, and what tells that values have changed.

A parameter has a generation, a number that grows when its values change.  It changes when an optimizer that
owns it steps, on `load_state_dict`, and when somebody may have written to it in any other way and its
fingerprint has changed.  A bucket's generation is the largest of its parameters'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fcdp_compile.params.fingerprint import fingerprints
from fcdp_compile.params.home_shard import HomeShard
from fcdp_compile.params.home_tensor import HomeTensor, seal
from fcdp_compile.params.seal import Seal


class Generations:
    """Generations of a model's parameters; every rank makes the same calls and has the same numbers."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._clock = 0
        self._of = dict.fromkeys(keys, 0)

    def change(self, keys: Iterable[str]) -> None:
        """The values of these parameters are not what they were."""
        self._clock += 1
        for key in keys:
            self._of[key] = self._clock

    def of(self, keys: Iterable[str]) -> int:
        """The generation of a bucket of these parameters."""
        return max((self._of[key] for key in keys), default=0)


def read(values: Tensor) -> list[Any]:
    """The numbers in a tensor.  The Python thread waits for the device, which no ordinary step does.

    Whatever a step reads of a device it reads here.
    """
    found: list[Any] = values.tolist()
    return found


class Seals:
    """The seals that a model has put on its parameters, by key (`seal`, [Note: seals])."""

    def __init__(self) -> None:
        self._own: dict[str, Seal] = {}

    def changed(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """The keys of those of these parameters that may have other values than when this was last asked.

        All are sealed, so that next time it is known what nobody has touched.  One that is looked at for the
        first time counts as changed, and so does one that cannot be sealed, or that has another seal than the
        one put on here under its key: it was exchanged, or another model looks at it, too.  Waits for the
        device only for those whose memory others got hold of.
        """
        keys = [key for key, p in parameters.items() if not isinstance(p, HomeShard)]
        touched: dict[str, HomeShard] = {}
        for key, p in parameters.items():
            if isinstance(p, HomeShard) and not (
                self._has(key, p) and self._own[key].is_intact(p.held)
            ):
                touched[key] = p
        comparable = {
            key: p
            for key, p in touched.items()
            if self._has(key, p) and self._own[key].mark is not None
        }
        differ = dict(zip(comparable, differing(list(comparable.values())), strict=True))
        keys += [key for key in touched if differ.get(key, True)]
        if touched:
            seal(list(touched.values()))
        for key, p in touched.items():
            assert p.seal is not None, "it was put on just now"
            self._own[key] = p.seal
        return keys

    def _has(self, key: str, parameter: HomeShard) -> bool:
        return parameter.seal is not None and parameter.seal is self._own.get(key)


def differing(tensors: Sequence[HomeTensor]) -> list[bool]:
    """For each tensor with a broken seal, whether its values are others than it was sealed with."""
    if not tensors:
        return []
    then = [t.seal.mark for t in tensors if t.seal is not None and t.seal.mark is not None]
    assert len(then) == len(tensors), "seals that are intact have no marks"
    now = fingerprints([[t.present()] for t in tensors])
    return [bool(differs) for differs in read(now != torch.stack(then))]
