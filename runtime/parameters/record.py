"""Where a sharded model keeps its parameters, and the generations of their values."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcdp_compile.core.params.home_shard import HomeShard, check_cut, placements_of
from fcdp_compile.core.params.registry import ParamSpec, check_shard
from fcdp_compile.errors import FcdpError
from fcdp_compile.plan import Bucket
from fcdp_compile.torch_compat.tensors import storage_id


class ParamRecord:
    """One parameter: its spec and where the model keeps it, several places if it is tied.

    Modules are held weakly and the parameter is looked up, because a user may replace it.
    """

    __slots__ = ("_checked", "_places", "spec")

    def __init__(self, spec: ParamSpec) -> None:
        self.spec = spec
        self._checked: object = None  # the last DTensor's spec whose cut was right
        self._places: list[tuple[weakref.ref[nn.Module], str]] = []

    def add_place(self, module: nn.Module, name: str) -> None:
        """Note a place of the parameter."""
        self._places.append((weakref.ref(module), name))

    def parameter(self) -> nn.Parameter:
        """The parameter as it is now.

        Raises: FcdpError if its module is gone or no longer has it.
        """
        if (parameter := self.living()) is None:
            raise FcdpError(
                f"parameter {self.spec.name!r} was removed from the model after fcdp_compile.shard; "
                "shard the model again after changing its structure"
            )
        return parameter

    def living(self) -> nn.Parameter | None:
        """The parameter as it is now, None if the model no longer has it.

        Raises: FcdpError if a DTensor of another mesh or with other placements replaced it, or if the places
        of a tied parameter now have different parameters.
        """
        now = self.places()
        if len(now) > 1 and any(p is not now[0] for p in now):
            raise FcdpError(
                f"parameter {self.spec.name!r} was tied when it was sharded and now has two values; tie its "
                "uses again, or untie them before fcdp_compile.shard"
            )
        if now and isinstance(now[0], DTensor) and now[0]._spec is not self._checked:
            # A local shard of the right shape may hold other rows, as on ("inter", "intra").
            check_cut(now[0], self.spec.key, placements_of(self.spec))
            self._checked = now[0]._spec
        return now[0] if now else None

    @property
    def lives(self) -> bool:
        """Whether the model still has the parameter, in any of its places."""
        for ref, name in self._places:
            if (module := ref()) is not None and module._parameters.get(name) is not None:
                return True
        return False

    def places(self) -> list[nn.Parameter]:
        """The parameter in each of its places now, unchecked."""
        return [
            parameter
            for ref, name in self._places
            if (module := ref()) is not None
            and (parameter := module._parameters.get(name)) is not None
        ]

    def owners(self) -> list[tuple[nn.Module, str]]:
        """The living modules that have it, in the order of the model, and its name in each."""
        modules = [(ref(), name) for ref, name in self._places]
        return [(m, name) for m, name in modules if m is not None]

    def is_home(self, shard: Tensor) -> bool:
        """Whether a tensor is this rank's home shard, or an alias of it; an empty tensor always is."""
        if self.holds(shard):  # nearly always; the rest takes 6 µs
            return True
        home = self.held(self.parameter())
        if shard is home or not shard.numel():
            return True
        layouts = [(t.storage_offset(), t.shape, t.stride(), t.dtype) for t in (shard, home)]
        return storage_id(shard) == storage_id(home) and layouts[0] == layouts[1]

    def holds(self, shard: Tensor) -> bool:
        """Whether a tensor is itself this rank's home shard of a parameter that has one place.

        In a single process the parameter is its own home shard.
        """
        if len(self._places) > 1:
            return False
        module, name = self._places[0]
        now = None if (owner := module()) is None else owner._parameters.get(name)
        return (now.held if isinstance(now, HomeShard) else now) is shard

    @staticmethod
    def held(parameter: Tensor) -> Tensor:
        """The local tensor of a parameter, which has no memory while the shard is released."""
        if isinstance(parameter, HomeShard):
            return parameter.held
        return parameter._local_tensor if isinstance(parameter, DTensor) else parameter

    def peek(self, parameter: Tensor | None = None) -> Tensor:
        """This rank's home shard to read, without autograd; a released shard is read on the host.

        parameter: one that is or was the parameter of this record; None: the parameter as it is now.
        """
        parameter = self.parameter() if parameter is None else parameter
        if not isinstance(parameter, HomeShard):
            return self.local_of(parameter)
        values = parameter.values()
        check_shard(self.spec, values)
        return values

    def to_fill(self, parameter: Tensor | None = None) -> Tensor:
        """Memory for other values of all of this rank's home shard; on the host if the shard is released.

        parameter: as for `peek`.  The caller must note that the values changed (`Validity.values_arrived`).
        """
        parameter = self.parameter() if parameter is None else parameter
        if not isinstance(parameter, HomeShard):
            return self.local_of(parameter)
        check_shard(self.spec, parameter.held)
        return parameter.to_fill()

    def local(self) -> Tensor:
        """This rank's home shard, without autograd."""
        return self.local_of(self.parameter())

    def local_of(self, parameter: Tensor) -> Tensor:
        """This rank's home shard of `parameter`, which is or was the parameter of this record."""
        local = parameter
        if isinstance(local, HomeShard):
            local.bring_back()
            local = local.held
        elif isinstance(local, DTensor):
            local = local._local_tensor
        check_shard(self.spec, local)
        return local.detach()


class Records(dict[str, ParamRecord]):
    """The parameters of a model by key, and those of each bucket.

    by_name: the same records by the parameter's name.  alike: for each key, the key of the first parameter
    with the same facts (`passes.planning.alike` [Note: alike parameters]).
    """

    def __init__(self, records: Iterable[ParamRecord]) -> None:
        self.by_name = {r.spec.name: r for r in records}
        super().__init__((r.spec.key, r) for r in self.by_name.values())
        first: dict[ParamSpec, str] = {}
        self.alike = {key: first.setdefault(r.spec.facts, key) for key, r in self.items()}
        self._keys_by_memory: dict[tuple[int, int], str] = {}

    def frozen(self) -> frozenset[str]:
        """The keys of the parameters that need no gradient now.

        `requires_grad` alone says what is frozen.  A graph is compiled for these keys, and its buckets are
        frozen or not; if a parameter is frozen or unfrozen later, Dynamo compiles the graph again.
        """
        living = {key: record.living() for key, record in self.items()}
        return frozenset(k for k, p in living.items() if p is not None and not p.requires_grad)

    def of(self, bucket: Bucket) -> list[ParamRecord]:
        """The parameters of a bucket, in its order."""
        return [self.by_name[p.name] for p in bucket.params]

    def by_parameter(self) -> dict[int, ParamRecord]:
        """The records by the `id` of the parameters that are in the model now."""
        return {id(p): record for record in self.values() for p in record.places()}

    def are_at(self, keys: Sequence[str | None], shards: Sequence[Tensor]) -> bool:
        """Whether `keys_at` of these tensors is `keys`; in less time if it is."""
        pairs = zip(keys, shards, strict=True)
        return all(
            key is not None and (self[key].holds(shard) or self._key_at(shard) == key)
            for key, shard in pairs
        )

    def keys_at(self, shards: Sequence[Tensor]) -> tuple[str | None, ...]:
        """The key of the parameter of which each tensor is the home shard or an alias; None for others."""
        found = tuple(map(self._key_at, shards))
        if None in found:  # home shards may have other memory now
            self._keys_by_memory = {
                _memory(record.held(p)): key
                for key, record in self.items()
                for p in record.places()
            }
            found = tuple(map(self._key_at, shards))
        return found

    def _key_at(self, shard: Tensor) -> str | None:
        key = self._keys_by_memory.get(_memory(shard))
        if key is None or not (places := self[key].places()):
            return None
        is_same = _memory(self[key].held(places[0])) == _memory(shard)
        return key if is_same and self[key].is_home(shard) else None

    def not_at_home(self, shards: Mapping[str, Tensor]) -> list[str]:
        """The names of the parameters for which `shards`, by key, has anything but the home shard.

        An empty shard counts as the home shard; another rank's shard tells.
        """
        return [
            self[key].spec.name for key, shard in shards.items() if not self[key].is_home(shard)
        ]


class Generations:
    """Generations of a model's parameters; every rank makes the same calls and has the same numbers."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._clock = 0
        self._of = dict.fromkeys(keys, 0)

    def change(self, keys: Iterable[str]) -> None:
        """Note that the values of these parameters have changed."""
        self._clock += 1
        for key in keys:
            self._of[key] = self._clock

    @property
    def now(self) -> int:
        """The latest generation of any parameter."""
        return self._clock

    def of(self, keys: Iterable[str]) -> int:
        """The generation of a bucket of these parameters."""
        return max((self._of[key] for key in keys), default=0)


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's elements begin."""
    return storage_id(tensor), int(tensor.storage_offset())
