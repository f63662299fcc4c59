"""torch's own tools on a sharded model at 2 x 2, with sizes that divide by nothing."""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fcdp_compile
from tests.distributed.beside import Beside, assert_close, whole
from tests.distributed.jobs import WORKS, Job, Verdicts, run_jobs
from tests.distributed.models import CASES

pytestmark = pytest.mark.distributed

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=False)
_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


def _pair(mesh: DeviceMesh, name: str = "odd") -> Beside:
    pair = Beside(mesh, CASES[name], optimizer=_adamw, options={"bucket_mb": 300 / 2**20})
    pair.train(2)
    return pair


def _names_and_flags(mesh: DeviceMesh) -> None:
    for name in ("odd", "odd-lora", "gpt2"):
        torch.manual_seed(0)
        plain = CASES[name].model()
        torch.manual_seed(0)
        model = fcdp_compile.shard(CASES[name].model(), mesh)
        assert list(model.state_dict()) == list(plain.state_dict())
        expected = [(n, p.requires_grad, tuple(p.shape)) for n, p in plain.named_parameters()]
        found = [(n, p.requires_grad, tuple(p.shape)) for n, p in model.named_parameters()]
        assert found == expected
        assert all(isinstance(p, nn.Parameter | DTensor) for p in model.parameters())
        tied = [[n for n, q in m.named_parameters(remove_duplicate=False)] for m in (model, plain)]
        assert tied[0] == tied[1]
        if name == "gpt2":
            assert (
                model.lm_head._parameters["weight"] is model.transformer.wte._parameters["weight"]
            )


def _full_state_dict(mesh: DeviceMesh) -> None:
    pair = _pair(mesh)
    expected = pair.plain.state_dict()
    found = get_model_state_dict(pair.model, options=_FULL)
    assert list(found) == list(expected)
    for name, value in found.items():
        assert not isinstance(value, DTensor)
        assert_close(value, expected[name], name)
    expected = {n: v.clone() for n, v in expected.items()}
    changed = {n: v * 0.5 + 0.1 for n, v in expected.items()}
    pair.plain.load_state_dict(changed)  # first: torch puts shards in the dictionary it is given
    set_model_state_dict(pair.model, changed if dist.get_rank() == 0 else {}, options=_FROM_RANK_0)
    pair.compare_parameters()
    pair.train(2)
    pair.plain.load_state_dict(expected)
    set_model_state_dict(pair.model, expected, options=_FULL)
    pair.train(2)
    pair.compare_parameters()


def _compiled_state_dict(mesh: DeviceMesh) -> None:
    """Names of the compiled model are those of the model, as torch's tools see them."""
    pair = _pair(mesh)
    assert list(get_model_state_dict(pair.net)) == list(pair.plain.state_dict())


def _dcp(mesh: DeviceMesh) -> None:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    pair = _pair(mesh)
    weights, moments = get_state_dict(pair.model, pair.optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folders[0])
    pair.train(2)
    wanted = {n: whole(p) for n, p in pair.model.named_parameters()}

    again = _pair(mesh)
    again.train(3)  # elsewhere, and more often
    weights, moments = get_state_dict(again.model, again.optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folders[0])
    set_state_dict(again.model, again.optimizer, model_state_dict=weights, optim_state_dict=moments)
    for step in (2, 3):
        again.case.loss(again.net, again.data(step)).backward()
        again.optimizer.step()
        again.optimizer.zero_grad()
    for name, parameter in again.model.named_parameters():
        assert torch.equal(whole(parameter), wanted[name]), f"{name} differs after resuming"


def _optimizer_state(mesh: DeviceMesh, *, with_scalar: bool = False) -> None:
    pair = _pair(mesh)
    if not with_scalar:
        for model in pair.both:
            model._parameters["scale"].requires_grad_(False)  # type: ignore[union-attr]
        pair.use(_adamw)
        pair.train(2)
    found = get_optimizer_state_dict(pair.model, pair.optimizer, options=_FULL)
    expected = get_optimizer_state_dict(pair.plain, pair.plain_optimizer, options=_FULL)
    assert list(found["state"]) == list(expected["state"])
    for name, moments in found["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert moments[key].shape == expected["state"][name][key].shape  # type: ignore[index]
            assert_close(moments[key], expected["state"][name][key], f"{key} of {name}")  # type: ignore[index]
    set_optimizer_state_dict(pair.model, pair.optimizer, copy.deepcopy(expected), options=_FULL)
    pair.train(2)
    pair.compare_parameters()


def _clipping(mesh: DeviceMesh) -> None:
    pair = _pair(mesh)
    for step in range(2, 5):
        pair.case.loss(pair.net, pair.data(step)).backward()
        pair.plain_backward(step)
        norms = [whole(nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for m in pair.both]
        assert norms[1] > 0.1, "the control: there is something to clip"
        assert_close(norms[0], norms[1], "norm of the gradient")
        pair.compare_gradients()
        pair.optimize()
        pair.compare_parameters()
    pair.case.loss(pair.net, pair.data(9)).backward()
    pair.plain_backward(9)
    for model in pair.both:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    pair.compare_gradients()


def _default_device(mesh: DeviceMesh) -> None:
    """What fcdp makes for itself is on the CPU, whatever device a user builds another model on."""
    pair = _pair(mesh)  # torch's optimizer takes the default device for its counts of steps
    torch._dynamo.reset()
    pair.net = pair.compiled(pair.model)
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    for step in (2, 3):
        batch = pair.data(step)
        pair.plain_backward(step)
        torch.set_default_device("meta")
        try:
            pair.case.loss(pair.net, batch).backward()
            pair.optimizer.step()
            if step == 2:
                fcdp_compile.save(folders[0], model=pair.model, optimizer=pair.optimizer).wait()
                fcdp_compile.load(folders[0], model=pair.model, optimizer=pair.optimizer)
        finally:
            torch.set_default_device(None)
        pair.optimizer.zero_grad()
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()
        pair.compare_parameters()


_JOBS: dict[str, Job] = {
    "default device": _default_device,
    "names and flags": _names_and_flags,
    "full state dict": _full_state_dict,
    "compiled state dict": _compiled_state_dict,
    "dcp": _dcp,
    "optimizer state": _optimizer_state,
    "optimizer state of a scalar": partial(_optimizer_state, with_scalar=True),
    "clipping": _clipping,
}


@pytest.fixture(scope="module")
def verdicts() -> Verdicts:
    return run_jobs(_JOBS, nodes=2, ranks_per_node=2)


@pytest.mark.parametrize("tool", _JOBS)
def test_a_tool_works_on_a_sharded_model(verdicts: Verdicts, tool: str) -> None:
    assert [v[tool] for v in verdicts] == [WORKS] * 4
