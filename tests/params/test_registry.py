"""The owner of a key, and how long it stays the owner."""

from __future__ import annotations

import gc

import pytest
import torch

from builders_graph import Where, key_of, make_spec
from fcdp_compile.core.params import registry
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.errors import FcdpError

SPEC = make_spec("w", (5, 3), Where())


class Owner:
    """An owner of one parameter."""

    def __init__(self, spec: ParamSpec = SPEC) -> None:
        self._spec = spec

    def spec(self, key: str) -> ParamSpec:
        assert key == self._spec.key
        return self._spec

    def gather_eagerly(self, key: str, shard: torch.Tensor) -> torch.Tensor:
        return shard.new_full(self._spec.layout.shape, 7)

    def reduce_eagerly(self, key: str, grad: torch.Tensor) -> torch.Tensor:
        return grad.new_full(self._spec.local_shape, 8)

    def accumulates_eagerly(self, key: str) -> bool:
        return False

    def accumulate_eagerly(self, key: str, grad: torch.Tensor) -> torch.Tensor:
        return grad.new_full(self._spec.local_shape, 9)


@pytest.fixture
def owner() -> Owner:
    owner = Owner()
    registry.register(SPEC.key, owner)
    return owner


def test_it_answers_while_it_lives(owner: Owner) -> None:
    assert registry.owner_of(SPEC.key) is owner
    assert registry.spec_of(SPEC.key) is SPEC


def test_the_registry_forgets_a_dead_owner() -> None:
    owner = Owner()
    registry.register(SPEC.key, owner)
    del owner
    gc.collect()
    for ask in (registry.owner_of, registry.spec_of):
        with pytest.raises(FcdpError, match="sharded model that no longer exists"):
            ask(SPEC.key)


def test_an_unknown_key() -> None:
    with pytest.raises(FcdpError, match="'m99:nothing'"):
        registry.owner_of("m99:nothing")


def test_model_numbers_are_never_given_twice() -> None:
    numbers = [registry.new_model_number() for _ in range(3)]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    "shard",
    [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 3), torch.zeros(6)],
    ids=["dtype", "rows", "shape"],
)
def test_another_shard_than_the_one_made_is_refused(shard: torch.Tensor, owner: Owner) -> None:
    registry.check_shard(SPEC, torch.zeros(SPEC.local_shape))  # the control
    assert tuple(shard.shape) != SPEC.local_shape or shard.dtype != SPEC.home_dtype
    with pytest.raises(FcdpError, match="convert the model before"):
        torch.ops.fcdp.unshard(shard, key_of("w"))


class TestOps:
    """The two ops ask the owner, eagerly and when traced."""

    def test_eagerly(self, owner: Owner) -> None:
        shard = torch.zeros(SPEC.local_shape, requires_grad=True)
        full = torch.ops.fcdp.unshard(shard, SPEC.key)
        assert torch.equal(full, torch.full((5, 3), 7.0))
        full.sum().backward()
        assert torch.equal(shard.grad, torch.full(SPEC.local_shape, 8.0))

    def test_on_meta(self) -> None:
        spec = make_spec("half", (5, 3), Where(), gathers=torch.bfloat16)
        owner = Owner(spec)
        registry.register(spec.key, owner)
        full = torch.ops.fcdp.unshard(torch.zeros(spec.local_shape, device="meta"), spec.key)
        assert (full.shape, full.dtype) == ((5, 3), torch.bfloat16)
        back = torch.ops.fcdp.reduce_grad(full, spec.key)
        assert (tuple(back.shape), back.dtype) == (spec.local_shape, torch.float32)
