"""torch's own tools on a sharded model at 2 x 2, with sizes that ranks do not divide."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import peft
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
from fcdp_compile.core.params.home_shard import HomeShard
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import FcdpError, PlanMismatchError
from tests.distributed.beside import Beside, assert_close, named, whole
from tests.distributed.jobs import WORKS, Job, Verdicts, asked, message_of, rows, run_jobs
from tests.distributed.models import CASES, batch

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
    pair.plain.load_state_dict(changed)  # first: torch replaces the dictionary's values by shards
    set_model_state_dict(pair.model, changed if dist.get_rank() == 0 else {}, options=_FROM_RANK_0)
    pair.compare_parameters()
    pair.train(2)
    pair.plain.load_state_dict(expected)
    set_model_state_dict(pair.model, expected, options=_FULL)
    pair.train(2)
    pair.compare_parameters()


def _compiled_state_dict(mesh: DeviceMesh) -> None:
    """The compiled model has the model's names for torch's tools."""
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
    again.train(3)  # other values, and more steps
    weights, moments = get_state_dict(again.model, again.optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folders[0])
    set_state_dict(again.model, again.optimizer, model_state_dict=weights, optim_state_dict=moments)
    for step in (2, 3):
        again.case.loss(again.net, again.data(step)).backward()
        again.optimizer.step()
        again.optimizer.zero_grad()
    for name, parameter in again.model.named_parameters():
        assert torch.equal(whole(parameter), wanted[name]), f"{name} differs after resuming"


def _optimizer_state(mesh: DeviceMesh) -> None:
    """The state as whole tensors, also a scalar's, by torch's tool and by the optimizer's own method."""
    pair = _pair(mesh)
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
    given = copy.deepcopy(pair.plain_optimizer.state_dict())
    for state in given["state"].values():
        state["exp_avg"] *= 3
    for again in (False, True):
        if not again:
            pair.use(_adamw)  # new optimizers, which have not stepped
        for optimizer in (pair.plain_optimizer, pair.optimizer):
            optimizer.load_state_dict(copy.deepcopy(given))
        pair.train(1)
        pair.compare_parameters()
    given["state"][3]["exp_avg_sq"] += dist.get_rank() == 2
    told = message_of(FcdpError, lambda: pair.optimizer.load_state_dict(given))
    assert "'exp_avg_sq of parameter 3' has other values on rank 2" in told, told


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


Change = Callable[[nn.Module, dict[str, torch.Tensor]], object]


def _swapping(model: nn.Module, values: dict[str, torch.Tensor], **options: Any) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(values, **options)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _some_cut(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Replace half of the values by DTensors."""
    own = model.state_dict()
    mixed: dict[str, Any] = dict(values)
    for name in list(own)[::2]:
        if isinstance(own[name], DTensor):
            mixed[name] = own[name].clone().copy_(own[name])
            mixed[name].to_local().copy_(named(model, name).part_of(values[name]))
    model.load_state_dict(mixed)


def _one_by_one(model: nn.Module, values: dict[str, torch.Tensor], *, data: bool) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            (parameter.data if data else parameter).copy_(values[name])


_CHANGES: dict[str, Change] = {
    "strict": lambda m, v: m.load_state_dict(v),
    "assigned": lambda m, v: m.load_state_dict(v, assign=True),
    "swapped": _swapping,
    "swapped and assigned": partial(_swapping, assign=True),
    "another dtype": lambda m, v: m.load_state_dict({n: t.double() for n, t in v.items()}),
    "of parameters": lambda m, v: m.load_state_dict({n: nn.Parameter(t) for n, t in v.items()}),
    "some cut": _some_cut,
    "a scalar of one element": lambda m, v: m.load_state_dict(
        {n: t.view(1) if t.dim() == 0 else t for n, t in v.items()}
    ),
    "below": lambda m, v: [
        child.load_state_dict({n.removeprefix(p): t for n, t in v.items() if n.startswith(p)})
        for p, child in ((f"{name}.", child) for name, child in m.named_children())
    ],
    "copied": partial(_one_by_one, data=False),
    "copied to .data": partial(_one_by_one, data=True),
}


def _whole_tensors(mesh: DeviceMesh) -> None:
    """Each rank takes its part of the given tensors; the home shards stay, and their copies become stale."""
    pair = _pair(mesh)
    before = [(p, p.requires_grad, p.dtype) for p in pair.model.parameters()]
    for i, (name, change) in enumerate(_CHANGES.items()):
        values = {n: v * 0.8 + 0.01 * i for n, v in pair.plain.state_dict().items()}
        if name == "below":  # the root's own parameters are not in it
            values |= {n: t for n, t in pair.plain.state_dict().items() if "." not in n}
        pair.plain.load_state_dict(copy.deepcopy(values))
        change(pair.model, values)
        pair.compare_parameters()
        now = [(p, p.requires_grad, p.dtype) for p in pair.model.parameters()]
        assert all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(before, now, strict=True)), name
        assert all(isinstance(p, HomeShard) for p in pair.model.parameters()), name
        assert not any(isinstance(v, DTensor) for v in values.values()), (
            "what was given stays whole"
        )
        if name in ("strict", "below", "copied to .data"):
            pair.train(1)
    missing = pair.model.load_state_dict({"scale": torch.tensor(3.0)}, strict=False).missing_keys
    assert "first.weight" in missing
    assert whole(named(pair.model, "scale")).item() == 3.0
    tied = fcdp_compile.shard(CASES["gpt2"].model(), mesh)
    values = {n: torch.rand_like(v) for n, v in CASES["gpt2"].model().state_dict().items()}
    for v in values.values():
        dist.broadcast(v, 0)
    tied.load_state_dict(values, assign=True)
    for n, p in tied.named_parameters(remove_duplicate=False):
        expected = "lm_head.weight" if n == "transformer.wte.weight" else n  # the last, as in torch
        assert torch.equal(whole(p), values[expected]), n
    assert tied.lm_head._parameters["weight"] is tied.transformer.wte._parameters["weight"]


def _whole_tensors_on_meta(mesh: DeviceMesh) -> None:
    values = {n: v + 1 for n, v in CASES["floats"].model().state_dict().items()}
    for v in values.values():
        dist.broadcast(v, 0)
    for assign in (False, True):
        with torch.device("meta"):
            model = CASES["floats"].model()
        fcdp_compile.shard(model, mesh)
        model.load_state_dict(values, assign=assign)
        assert not state_of(model).unset
        for name, value in model.state_dict().items():
            assert torch.equal(whole(value), values[name]), name
        assert all(isinstance(p, HomeShard) for p in model.parameters())


def _whole_adapters(mesh: DeviceMesh) -> None:
    """Load adapters as PEFT loads them."""
    torch.manual_seed(0)
    plain = CASES["odd-lora"].model()
    values = {n: v * 2 + 1 for n, v in peft.get_peft_model_state_dict(plain).items()}
    for low_memory in (False, True):
        torch.manual_seed(0)
        model = fcdp_compile.shard(CASES["odd-lora"].model(), mesh)
        for one in (model, plain):
            given = copy.deepcopy(values)
            peft.set_peft_model_state_dict(one, given, low_cpu_mem_usage=low_memory)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(p, HomeShard), name
            assert p.requires_grad == q.requires_grad, name
            assert torch.equal(whole(p), q.detach()), name


def _loads_that_are_refused(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = fcdp_compile.shard(CASES["odd"].model(), mesh)
    values = {n: whole(p) for n, p in model.named_parameters()}
    before = copy.deepcopy(values)
    other = {n: v + (n == "norm.weight" and dist.get_rank() == 1) for n, v in values.items()}
    told = message_of(FcdpError, lambda: model.load_state_dict(other))
    assert "'norm.weight' has other values on rank 1" in told, told

    def load_alone() -> None:
        if dist.get_rank() == 0:
            model.load_state_dict(values)
        else:
            model(batch(CASES["odd"], step=0, rank=0))

    told = message_of(PlanMismatchError, load_alone)
    assert "rank 0 loads whole tensors into the model: 'embedding.weight' and 8 more" in told, told
    assert "rank 1 gathers parameter 'embedding.weight'" in told, told
    bad = {**values, "norm.weight": torch.rand(8), "embedding.weight": torch.rand(3, 3)}
    told = message_of(RuntimeError, lambda: model.load_state_dict(bad))
    assert "size mismatch for embedding.weight" in told, told
    assert "size mismatch for norm.weight" in told, told
    for name, p in model.named_parameters():
        assert torch.equal(whole(p), before[name]), name


def _default_device(mesh: DeviceMesh) -> None:
    """The tensors of fcdp are on the CPU even if a user sets another default device."""
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
    "whole tensors": _whole_tensors,
    "whole tensors on meta": _whole_tensors_on_meta,
    "whole adapters": _whole_adapters,
    "loads that are refused": _loads_that_are_refused,
    "default device": _default_device,
    "names and flags": _names_and_flags,
    "full state dict": _full_state_dict,
    "compiled state dict": _compiled_state_dict,
    "dcp": _dcp,
    "optimizer state": _optimizer_state,
    "clipping": _clipping,
}

_SLOW = (
    "whole tensors",
    "whole adapters",
    "loads that are refused",
    "names and flags",
    "whole tensors on meta",
    "default device",
    "full state dict",
    "compiled state dict",
    "optimizer state",
)


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    return run_jobs(asked(request, _JOBS), nodes=2, ranks_per_node=2)


@pytest.mark.parametrize("tool", rows(_JOBS, slow=_SLOW))
def test_a_tool_works_on_a_sharded_model(verdicts: Verdicts, tool: str) -> None:
    assert [v[tool] for v in verdicts] == [WORKS] * 4
