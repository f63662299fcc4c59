"""A released shard is loaded again for a read or a write, and released again by the next forward."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from tests.distributed.beside import assert_close, named, whole
from tests.distributed.jobs import WORKS, Job, Verdicts, asked, run_jobs
from tests.distributed.parity import values
from tests.distributed.released import (
    NAMES,
    forward,
    frozen_of,
    held_bytes,
    make_pair,
    there,
)

pytestmark = [pytest.mark.distributed, pytest.mark.rare]

Read = Callable[[Any], Tensor]
"""Computes a parameter's whole value from its shard."""


def _pickled(p: Any) -> Tensor:
    stream = io.BytesIO()
    torch.save(p.to_local(), stream)
    stream.seek(0)
    local = torch.load(stream)
    assert torch.equal(local, p.to_local())
    return whole(p)


def _computed(p: Any) -> Tensor:
    (one,) = torch._foreach_norm([p])
    for norm in (p.norm(), one):  # a sum over parts, so not bitwise
        assert_close(whole(norm), whole(p).norm(), "norm")
    return whole(p)


def _compiled_read(p: Any) -> Tensor:
    """Another backend's graph takes shards, not whole values."""
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
    pair = make_pair(mesh)
    for name in NAMES:
        parameter, expected = named(pair.model, name), named(pair.plain, name).detach()
        for way, read in READS.items():
            about = f"{way} of {name}"
            assert not there(pair.model), f"the control, before {about}"
            found = read(parameter).detach().clone()
            assert torch.equal(found, expected), about
            forward(pair)
            assert not there(pair.model), f"released again after {about}"
        for way, read in LOCAL_READS.items():
            local = read(parameter).detach().clone()
            forward(pair)
            assert not held_bytes(parameter)
            assert torch.equal(local, parameter.to_local()), f"{way} of {name}"
            forward(pair)
    pair.train(2)
    pair.compare_parameters()


def _kept_aliases(mesh: DeviceMesh) -> None:
    """An alias that a user keeps stays readable, and writes to the alias count."""
    pair = make_pair(mesh)
    parameter, plain = (named(m, "first.base_layer.weight") for m in pair.both)
    for way, read in LOCAL_READS.items():
        local = read(parameter)
        forward(pair)
        assert bool(held_bytes(parameter)) == bool(local.numel()), f"not released under {way}"
        assert there(pair.model) in ([], ["base_model.model.first.base_layer.weight"])
        with torch.no_grad():
            local.mul_(0.5)
            plain.mul_(0.5)
        del local
        pair.train(1)
        pair.compare_parameters()
        forward(pair)
        assert not there(pair.model)
    parameter = named(pair.model, "first.base_layer.bias")
    array = parameter.to_local().detach().numpy()
    values_then = array.copy()
    forward(pair)
    assert (array == values_then).all()
    state = pair.model.state_dict()
    kept = {n: v.clone() for n, v in state.items()}
    forward(pair)
    assert all(torch.equal(state[n], kept[n]) for n in frozen_of(pair.model))


def _state_dicts(mesh: DeviceMesh) -> None:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    pair = make_pair(mesh)
    expected = {n: v.clone() for n, v in pair.plain.state_dict().items()}
    trained = [n for n, p in pair.plain.named_parameters() if p.requires_grad]
    for n in trained:
        expected[n] = whole(pair.model.state_dict()[n])
    for way in (pair.model.state_dict, lambda: get_model_state_dict(pair.model)):
        forward(pair)
        assert not there(pair.model)
        found = {n: whole(v).clone() for n, v in way().items()}
        assert all(torch.equal(found[n], v) for n, v in expected.items())
    forward(pair)
    assert not there(pair.model)
    dcp.save(get_model_state_dict(pair.model), checkpoint_id=folders[0])
    halves = {n: v * 0.5 for n, v in expected.items()}
    pair.model.load_state_dict({n: v * 0.5 for n, v in pair.model.state_dict().items()})
    pair.plain.load_state_dict(halves)
    pair.train(2)
    assert not there(pair.model)
    pair.compare_parameters()
    weights = get_model_state_dict(pair.model)
    dcp.load(weights, checkpoint_id=folders[0])
    set_model_state_dict(pair.model, weights)
    del weights
    assert all(torch.equal(v, expected[n]) for n, v in values(pair.model).items())
    pair.plain.load_state_dict(expected)
    pair.train(2)
    pair.compare_parameters()
    # Only the trained parameters: the others stay on the host, with an older generation.
    pair.model.load_state_dict({n: pair.model.state_dict()[n] for n in trained}, strict=False)
    forward(pair)
    assert not there(pair.model)
    frozen = frozen_of(pair.model)
    assert all(torch.equal(whole(p), expected[n]) for n, p in frozen.items())


_JOBS: dict[str, Job] = {
    "reads": _reads,
    "aliases that are kept": _kept_aliases,
    "state dicts": _state_dicts,
}


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank a node", "two ranks a node"])
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    return run_jobs(asked(request, _JOBS), nodes=2, ranks_per_node=request.param)


@pytest.mark.parametrize("job", _JOBS)
def test_released_shards_and(verdicts: Verdicts, job: str) -> None:
    assert {v[job] for v in verdicts} == {WORKS}
