"""Frozen home shards leave the device once the host has them, and come back for who reads or writes one."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

import fcdp_compile
from fcdp_compile.home_shard import HomeShard
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.sharding import state_of
from tests.distributed.beside import Beside, assert_close, whole
from tests.distributed.models import CASES, Case, odd_lora
from tests.distributed.parity import values
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

_OPTIONS = {"bucket_mb": 300 / 2**20}  # several buckets
_NAMES = ("first.base_layer.weight", "first.base_layer.bias", "scale", "embedding.weight")
"""Evenly and unevenly cut, a scalar, a tied one."""


def _frozen(model: nn.Module) -> dict[str, HomeShard]:
    return {n: p for n, p in model.named_parameters() if not p.requires_grad}  # type: ignore[misc]


def _bytes(parameter: HomeShard) -> int:
    return parameter.held.untyped_storage().nbytes()


def _there(model: nn.Module) -> list[str]:
    """The frozen parameters whose shards take memory on this rank; comparing parameters brings them back."""
    return [n for n, p in _frozen(model).items() if _bytes(p)]


def _named(model: nn.Module, name: str) -> Any:
    (found,) = (p for n, p in model.named_parameters() if f".{n}".endswith(f".{name}"))
    return found


def _forward(pair: Beside, step: int = 1000) -> Tensor:
    return pair.case.loss(pair.net, pair.data(step))


def _pair(mesh: DeviceMesh, case: str | Case = "odd-lora", **more: Any) -> Beside:
    chosen = CASES[case] if isinstance(case, str) else case
    pair = Beside(mesh, chosen, options=_OPTIONS, **more)
    pair.train(2)
    return pair


# --- training -------------------------------------------------------------------------------------------


def _losses(
    mesh: DeviceMesh, name: str, strategy: str
) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Of a few steps, the parameters after them, and bytes of frozen shards after shard and each forward."""
    pair = Beside(mesh, CASES[name], options=_OPTIONS, strategy=strategy)
    sizes = [sum(map(_bytes, _frozen(pair.model).values()))]
    losses = []
    for step in range(4):
        loss = _forward(pair, step)
        sizes.append(sum(map(_bytes, _frozen(pair.model).values())))
        loss.backward()
        sizes.append(sum(map(_bytes, _frozen(pair.model).values())))
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        losses.append(loss.item())
    return losses, values(pair.model), sizes


def _with_and_without(mesh: DeviceMesh, name: str) -> tuple[list[int], list[int], list[int]]:
    losses, parameters, sizes = _losses(mesh, name, "fcdp")
    other_losses, other_parameters, other_sizes = _losses(mesh, name, "zero3")
    release = ShardedModel.release_shards
    ShardedModel.release_shards = lambda self, bucket: None  # type: ignore[method-assign]
    try:
        kept_losses, kept_parameters, kept_sizes = _losses(mesh, name, "fcdp")
    finally:
        ShardedModel.release_shards = release  # type: ignore[method-assign]
    assert losses == kept_losses == other_losses
    for n, value in parameters.items():
        assert torch.equal(value, kept_parameters[n]), n
        assert torch.equal(value, other_parameters[n]), n
    return sizes, kept_sizes, other_sizes


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (2, 1)])
@pytest.mark.parametrize("name", ["odd-lora", "llama-lora"])
def test_memory_falls_and_no_number_changes(name: str, nodes: int, ranks_per_node: int) -> None:
    for sizes, kept, zero3 in run(
        _with_and_without, name, nodes=nodes, ranks_per_node=ranks_per_node
    ):
        assert sizes[0] > 0
        assert sizes[1:] == [0] * 8, "after every forward and backward"
        assert kept == zero3 == [sizes[0]] * 9, (
            "the control: they stay without it, and under ZeRO-3"
        )


# --- reading --------------------------------------------------------------------------------------------

Read = Callable[[Any], Tensor]
"""Of one shard: to its whole value."""


def _pickled(p: Any) -> Tensor:
    stream = io.BytesIO()
    torch.save(p.to_local(), stream)
    stream.seek(0)
    local = torch.load(stream)
    assert torch.equal(local, p.to_local())
    return whole(p)


def _computed(p: Any) -> Tensor:
    (one,) = torch._foreach_norm([p])
    for norm in (p.norm(), one):  # of parts, so not bitwise
        assert_close(whole(norm), whole(p).norm(), "norm")
    return whole(p)


def _compiled_read(p: Any) -> Tensor:
    """Another backend's graph takes shards as they are."""
    return whole(torch.compile(lambda q: q * 1.0, backend="aot_eager")(p))


READS: dict[str, Read] = {
    "full_tensor": lambda p: p.full_tensor(),
    "detach": lambda p: p.detach().full_tensor(),
    "clone": lambda p: p.clone().full_tensor(),
    "data": lambda p: p.data.full_tensor(),
    "redistribute": lambda p: p.redistribute(placements=[Replicate(), Replicate()]).to_local(),
    "in a computation": lambda p: (p + 0.0).full_tensor(),
    "norms": _computed,
    "copy_ from": lambda p: torch.empty_like(p).copy_(p).full_tensor(),
    "torch.save": _pickled,
    "another backend": _compiled_read,
    "inference mode": torch.inference_mode()(lambda p: (p * 1.0).full_tensor()),
    "printed": lambda p: (repr(p), whole(p))[1],
}
LOCAL_READS: dict[str, Callable[[Any], Tensor]] = {
    "to_local": lambda p: p.to_local(),
    "to_local without gradients": torch.no_grad()(lambda p: p.to_local()),
    "_local_tensor": lambda p: p._local_tensor,
    "detach().to_local": lambda p: p.detach().to_local(),
    "data.to_local": lambda p: p.data.to_local(),
}


def _reads(mesh: DeviceMesh) -> None:
    pair = _pair(mesh)
    for name in _NAMES:
        parameter, expected = _named(pair.model, name), _named(pair.plain, name).detach()
        for way, read in READS.items():
            about = f"{way} of {name}"
            assert not _there(pair.model), f"the control, before {about}"
            found = read(parameter).detach().clone()
            assert torch.equal(found, expected), about
            _forward(pair)
            assert not _there(pair.model), f"released again after {about}"
        for way, read in LOCAL_READS.items():
            local = read(parameter).detach().clone()
            _forward(pair)
            assert not _bytes(parameter)
            assert torch.equal(local, parameter.to_local()), f"{way} of {name}"
            _forward(pair)
    pair.train(2)
    pair.compare_parameters()


def _kept_aliases(mesh: DeviceMesh) -> None:
    """What somebody holds on to stays readable, and writes to it count."""
    pair = _pair(mesh)
    parameter, plain = (_named(m, "first.base_layer.weight") for m in pair.both)
    for way, read in LOCAL_READS.items():
        local = read(parameter)
        _forward(pair)
        assert bool(_bytes(parameter)) == bool(local.numel()), f"not released under {way}"
        assert _there(pair.model) in ([], ["base_model.model.first.base_layer.weight"])
        with torch.no_grad():
            local.mul_(0.5)
            plain.mul_(0.5)
        del local
        pair.train(1)
        pair.compare_parameters()
        _forward(pair)
        assert not _there(pair.model)
    parameter = _named(pair.model, "first.base_layer.bias")
    array = parameter.to_local().detach().numpy()
    values_then = array.copy()
    _forward(pair)
    assert (array == values_then).all()
    state = pair.model.state_dict()
    kept = {n: v.clone() for n, v in state.items()}
    _forward(pair)
    assert all(torch.equal(state[n], kept[n]) for n in _frozen(pair.model))


def _state_dicts(mesh: DeviceMesh) -> None:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    pair = _pair(mesh)
    expected = {n: v.clone() for n, v in pair.plain.state_dict().items()}
    trained = [n for n, p in pair.plain.named_parameters() if p.requires_grad]
    for n in trained:
        expected[n] = whole(pair.model.state_dict()[n])
    for way in (pair.model.state_dict, lambda: get_model_state_dict(pair.model)):
        _forward(pair)
        assert not _there(pair.model)
        found = {n: whole(v).clone() for n, v in way().items()}
        assert all(torch.equal(found[n], v) for n, v in expected.items())
    _forward(pair)
    assert not _there(pair.model)
    dcp.save(get_model_state_dict(pair.model), checkpoint_id=folders[0])
    halves = {n: v * 0.5 for n, v in expected.items()}
    pair.model.load_state_dict({n: v * 0.5 for n, v in pair.model.state_dict().items()})
    pair.plain.load_state_dict(halves)
    pair.train(2)
    assert not _there(pair.model)
    pair.compare_parameters()
    weights = get_model_state_dict(pair.model)
    dcp.load(weights, checkpoint_id=folders[0])
    set_model_state_dict(pair.model, weights)
    del weights
    assert all(torch.equal(v, expected[n]) for n, v in values(pair.model).items())
    pair.plain.load_state_dict(expected)
    pair.train(2)
    pair.compare_parameters()
    # Nothing but the trained parameters: the rest stays on the host, of an older generation.
    pair.model.load_state_dict({n: pair.model.state_dict()[n] for n in trained}, strict=False)
    _forward(pair)
    assert not _there(pair.model)
    frozen = _frozen(pair.model)
    assert all(torch.equal(whole(p), expected[n]) for n, p in frozen.items())


# --- between a forward and its backward; other kinds of forwards ----------------------------------------


def _between(mesh: DeviceMesh) -> None:
    pair = _pair(mesh)
    for read in (lambda: values(pair.model), lambda: pair.model.to(torch.float32), lambda: None):
        first, second = _forward(pair, 50), _forward(pair, 51)
        assert not _there(pair.model)
        read()
        first.backward()
        read()
        second.backward()
        pair.plain_backward(50, 51)
        pair.compare_gradients()
        pair.optimize()
    pair.train(2)
    pair.compare_parameters()


def _evaluation(mesh: DeviceMesh) -> None:
    pair = _pair(mesh)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert pair.losses(7)[0] == pytest.approx(pair.losses(7)[1], rel=1e-5)
            assert not _there(pair.model)
            for parameter in _frozen(pair.model).values():
                parameter.full_tensor()  # comes back inside
            pair.losses(8)
        pair.train(2)
        assert not _there(pair.model)
        pair.compare_parameters()
    eager = pair.case.loss(pair.model, pair.data(9))  # gathers every shard itself
    assert eager.item() == pytest.approx(_forward(pair, 9).item(), rel=1e-5)
    assert not _there(pair.model)


class _Reading(nn.Module):
    """Reads a frozen parameter past its property, in the graph, and keeps a function of it for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = odd_lora()

    def forward(self, ids: Tensor) -> Tensor:
        norm = self.inner.base_model.model.norm._parameters["weight"]
        found = self.inner(ids)
        if isinstance(norm, HomeShard):
            norm = norm.full_tensor()
        return found * norm.sum()


_READING = Case(model=_Reading, loss=CASES["odd-lora"].loss, vocabulary=CASES["odd"].vocabulary)


def _read_in_a_graph(mesh: DeviceMesh) -> None:
    pair = _pair(mesh, _READING)
    first, second = _forward(pair, 60), _forward(pair, 61)
    second.backward()
    first.backward()
    pair.plain_backward(60, 61)
    pair.compare_gradients()
    pair.optimize()
    pair.train(2)
    name = "inner.base_model.model.norm.weight"
    assert set(_there(pair.model)) <= {name}, "what no graph reads is away"
    pair.compare_parameters()


def _compiled_caller(mesh: DeviceMesh) -> None:
    """The guards of a compiled function around the model look before the model is called."""
    pair = _pair(mesh)

    def loss(ids: Tensor) -> Tensor:
        return pair.case.loss(pair.model, ids)

    compiled = torch.compile(loss, backend="fcdp", options=_OPTIONS)
    for step in range(20, 23):
        compiled(pair.data(step)).backward()
        pair.plain_backward(step)
        pair.compare_gradients()
        pair.optimize()
    pair.compare_parameters()


def _unfreezing(mesh: DeviceMesh) -> None:
    pair = _pair(mesh)
    for name in _NAMES:
        _forward(pair)
        assert not _bytes(_named(pair.model, name))
        for model in pair.both:
            _named(model, name).requires_grad_(True)
        pair.use(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        pair.train(2)
        assert not _there(pair.model)
        pair.compare_parameters()
        for model in pair.both:
            _named(model, name).requires_grad_(False)
        pair.use(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        pair.train(2)
        assert not _there(pair.model)
        pair.compare_parameters()


def _two_models(mesh: DeviceMesh) -> None:
    first = _pair(mesh)
    second = _pair(mesh)  # resets Dynamo: the first one's graphs compile again
    for pair in (first, second, first):
        pair.train(1)
        assert not _there(pair.model)
        pair.compare_parameters()
    _forward(first)
    del second, pair
    parameter = _named(first.model, "first.base_layer.weight")
    expected = _named(first.plain, "first.base_layer.weight")
    del first  # the parameter still comes back, from what its model had on the host
    assert not _bytes(parameter)
    assert torch.equal(whole(parameter), expected)


def _of_less_precision(mesh: DeviceMesh) -> None:
    """What travels in bf16 is no copy of an fp32 shard."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fcdp_compile.shard(CASES["odd-lora"].model(), mesh, param_dtype=torch.bfloat16)
    net = torch.compile(model, backend="fcdp", options=_OPTIONS)
    for step in range(2):
        ids = torch.randint(0, 17, (2, 16), generator=torch.Generator().manual_seed(step))
        CASES["odd-lora"].loss(net, ids).backward()
    assert _there(model) == [n for n, p in _frozen(model).items() if p.held.numel()]


def _no_fingerprints(mesh: DeviceMesh) -> None:
    pair = _pair(mesh)
    state = state_of(pair.model)
    seen: list[int] = []
    changed = state.fingerprints.changed
    state.fingerprints.changed = lambda shards: (seen.extend(shards), changed(shards))[1]  # type: ignore[method-assign]
    _forward(pair)
    frozen = {b.id for bs in state.known_buckets().values() for b in bs if b.frozen}
    assert seen, "the control: adapters are looked at"
    assert not frozen & set(seen), "nothing can have been written to what is not there"
    seen.clear()
    values(pair.model)
    _forward(pair)
    assert frozen <= set(seen)


_JOBS: dict[str, Callable[[DeviceMesh], None]] = {
    "reads": _reads,
    "aliases that are kept": _kept_aliases,
    "state dicts": _state_dicts,
    "between forward and backward": _between,
    "evaluation": _evaluation,
    "a graph that reads a shard": _read_in_a_graph,
    "a compiled caller": _compiled_caller,
    "unfreezing": _unfreezing,
    "two models": _two_models,
    "less precision": _of_less_precision,
    "fingerprints": _no_fingerprints,
}


def _all(mesh: DeviceMesh, names: tuple[str, ...]) -> dict[str, str]:
    torch._dynamo.config.recompile_limit = 64
    verdicts = {}
    for name in names:
        try:
            _JOBS[name](mesh)
        except Exception as error:
            verdicts[name] = f"{type(error).__name__}: {error}"
        else:
            verdicts[name] = "works"
        dist.barrier()
    return verdicts


@pytest.fixture(scope="module")
def verdicts() -> list[dict[str, str]]:
    return run(_all, tuple(_JOBS), nodes=2, ranks_per_node=2)


@pytest.mark.parametrize("job", _JOBS)
def test_released_shards_and(verdicts: list[dict[str, str]], job: str) -> None:
    assert [v[job] for v in verdicts] == ["works"] * 4


def test_one_rank_a_node() -> None:
    names = ("reads", "aliases that are kept", "state dicts", "unfreezing")
    for verdict in run(_all, names, nodes=2, ranks_per_node=1):
        assert verdict == dict.fromkeys(names, "works")
