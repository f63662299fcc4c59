"""Compiled functions that get other values than the model's own parameters."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call, grad, jacrev, jvp, vmap

import fcdp_compile
from fcdp_compile.errors import FcdpError, StaleParameterError
from tests.device.choice import seeded
from tests.distributed.beside import assert_close, whole
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

Values = dict[str, Tensor]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 9)
        self.base.requires_grad_(False)
        self.head = nn.Linear(9, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.tanh(self.base(inputs))) * self.scale
        return outputs


def _batch(rank: int) -> Tensor:
    return torch.randn(4, 7, generator=seeded(rank))


def _pair(mesh: DeviceMesh | None, strategy: str) -> tuple[_Net, _Net]:
    torch.manual_seed(0)
    plain = _Net()
    return plain, fcdp_compile.shard(copy.deepcopy(plain), mesh, strategy=strategy)


def _times(model: nn.Module, factor: float) -> Values:
    return {n: p.detach() * factor for n, p in model.named_parameters()}


def _mine_and_others(mesh: DeviceMesh, strategy: str) -> None:
    """Given values that change from call to call, in turn with the model's own values, which are cached."""
    plain, model = _pair(mesh, strategy)
    given = torch.compile(lambda v, x: functional_call(model, v, (x,)), backend="fcdp")
    own = torch.compile(model, backend="fcdp")
    x = _batch(torch.distributed.get_rank())
    with torch.no_grad():
        for factor in (1.0, 0.5):
            assert_close(own(x), plain(x), "own values")
            got = given(_times(model, factor), x)
            assert_close(got, functional_call(plain, _times(plain, factor), (x,)), "other values")
        detached = {n: p.detach() for n, p in model.named_parameters()}
        assert_close(given(detached, x), plain(x), "own values, detached")


def _made_inside(mesh: DeviceMesh, strategy: str) -> None:
    """One graph uses values that it computes and the model's own values; both have gradients."""
    plain, model = _pair(mesh, strategy)

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        halves = {n: p * 0.5 for n, p in net.named_parameters()}
        difference: Tensor = net(x) - functional_call(net, halves, (x,))
        return difference.square().mean()

    compiled = torch.compile(lambda x: loss_of(model, x), backend="fcdp")
    batches = [_batch(r) for r in range(torch.distributed.get_world_size())]
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        compiled(batches[torch.distributed.get_rank()]).backward()
        for batch in batches:
            (loss_of(plain, batch) / len(batches)).backward()
        _assert_same_gradients(model, plain)


def _fast_weights(mesh: DeviceMesh, strategy: str) -> None:
    """Values with a history: gradients flow through them to the parameters, within `no_sync` as well."""
    plain, model = _pair(mesh, strategy)
    given = torch.compile(lambda v, x: functional_call(model, v, (x,)), backend="fcdp")
    own = torch.compile(model, backend="fcdp")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        fast = {n: p * 0.5 for n, p in model.named_parameters()}
        given(fast, _batch(rank)).square().mean().backward()
        own(_batch(rank + 9)).square().mean().backward()
        for r in range(world):
            values = {n: p * 0.5 for n, p in plain.named_parameters()}
            (functional_call(plain, values, (_batch(r),)).square().mean() / world).backward()
            (plain(_batch(r + 9)).square().mean() / world).backward()
        _assert_same_gradients(model, plain)
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    with fcdp_compile.no_sync(model):
        given({n: p * 0.5 for n, p in model.named_parameters()}, _batch(rank)).sum().backward()
    for r in range(world):
        values = {n: p * 0.5 for n, p in plain.named_parameters()}
        (functional_call(plain, values, (_batch(r),)).sum() / world).backward()
    _assert_same_gradients(model, plain)


def _changed_before_backward(mesh: DeviceMesh, strategy: str) -> None:
    _, model = _pair(mesh, strategy)
    given = torch.compile(lambda v, x: functional_call(model, v, (x,)), backend="fcdp")
    values = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}
    loss = given(values, _batch(0)).square().mean()
    with torch.no_grad():
        values["head.weight"].to_local().data.mul_(2)
    with pytest.raises(StaleParameterError, match="changed between"):
        loss.backward()


def _some_given(mesh: DeviceMesh, strategy: str) -> None:
    """Values with a history replace some of the parameters."""
    plain, model = _pair(mesh, strategy)
    given = torch.compile(lambda v, x: functional_call(model, v, (x,)), backend="fcdp")
    x = _batch(torch.distributed.get_rank())
    got = given({"head.weight": model.head.weight * 2}, x)
    assert_close(got, functional_call(plain, {"head.weight": plain.head.weight * 2}, (x,)), "some")
    got.sum().backward()


def _whole(mesh: DeviceMesh, strategy: str) -> None:
    """Whole tensors are refused on every rank, also where one has the shape of this rank's shard."""
    _, model = _pair(mesh, strategy)

    def call(values: Values, x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(model, values, (x,))
        return outputs

    for given in (call, torch.compile(call, backend="fcdp")):
        for name, value in (("scale", torch.ones(1)), ("head.weight", torch.ones(3, 9))):
            # Dynamo wraps what is raised while it traces.
            with pytest.raises(Exception, match=rf"Error.*'{name}'|'{name}' was added or replaced"):
                given({name: value}, _batch(0))


def _transforms(mesh: DeviceMesh | None, strategy: str) -> None:
    """A vmap over inputs and transforms within `gathered` are exact; derivatives outside are refused."""
    plain, model = _pair(mesh, strategy)
    x = _batch(0)
    vmap(plain)(x).square().sum().backward()
    got = vmap(model)(x)
    assert_close(got, plain(x), "vmap")
    got.square().sum().backward()
    _assert_same_gradients(model, plain)
    twice = _times(model, 2.0)
    got = vmap(lambda row: functional_call(model, twice, (row,)))(x)
    assert_close(got, functional_call(plain, _times(plain, 2.0), (x,)), "vmap of given values")

    def by_samples(net: nn.Module) -> Values:
        """The gradients of the parameters for each row."""
        values = {n: p.detach() for n, p in net.named_parameters()}
        one = grad(lambda v, row: functional_call(net, v, (row,)).square().sum())
        found: Values = vmap(one, in_dims=(None, 0))(values, x)
        return found

    with fcdp_compile.gathered(model):
        for name, value in by_samples(model).items():
            assert_close(
                value, by_samples(plain)[name], f"gradients of rows within gathered: {name}"
            )
    with torch.no_grad():
        assert_close(jvp(model, (x,), (x,))[1], jvp(plain, (x,), (x,))[1], "jvp without gradients")
    calls: list[Callable[[], object]] = [
        lambda: grad(lambda inputs: model(inputs).sum())(x),
        lambda: jvp(model, (x,), (x,)),
        lambda: jacrev(model)(x),
        lambda: by_samples(model),
    ]
    for call in calls:
        with pytest.raises(FcdpError, match=r"within a block of fcdp_compile.gathered"):
            call()


def _assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if q.grad is not None:
            assert p.grad is not None, name
            assert_close(whole(p.grad), q.grad, f"gradient of {name}")


def _all(mesh: DeviceMesh, strategies: list[str]) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fcdp_compile").addHandler(handler)
    for strategy in strategies:
        for case in (
            _mine_and_others,
            _made_inside,
            _fast_weights,
            _some_given,
            _whole,
            _transforms,
            _changed_before_backward,
        ):
            torch.compiler.reset()
            case(mesh, strategy)
    return [t for t in told if "other values than the model's own" in t]


@pytest.mark.rare
def test_they_are_gathered_for_themselves() -> None:
    for told in run(_all, ["fcdp", "zero2", "zero3", "ddp"], nodes=2, ranks_per_node=1):
        assert told


@pytest.mark.rare
def test_on_two_levels() -> None:
    run(_all, ["fcdp"], nodes=2, ranks_per_node=2)


def test_in_one_process() -> None:
    torch.manual_seed(0)
    plain = _Net()
    model = fcdp_compile.shard(copy.deepcopy(plain))
    got = functional_call(model, _times(model, 0.5), (_batch(0),))
    assert torch.equal(got, functional_call(plain, _times(plain, 0.5), (_batch(0),)))
    _transforms(None, "fcdp")
