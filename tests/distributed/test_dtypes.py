"""param_dtype and reduce_dtype, compared with a replica that makes the same casts by hand.

fp32 home shards are cast for the forward and backward, gradients are averaged in the reduce dtype within
nodes and then between them, and AdamW steps the fp32 values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call

import fcdp_compile
from fcdp_compile import Strategy
from fcdp_compile.core.ranks.lost_ranks import Wait, finish, naming_lost_ranks
from fcdp_compile.errors import LostRankError
from fcdp_compile.strategy import GradientOn
from tests.device.choice import seeded
from tests.distributed.models import Case
from tests.distributed.parity import (
    GRADIENT_FLOOR,
    LEARNING_RATE,
    Sharded,
    Trial,
    adamw,
    build,
    check_close,
    gradients,
    values,
)
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

# Both sides run equal kernels on equal low precision values; only the order differs in which gradients of a
# value with two uses are added: at most a rounding or two of the dtype.  Under AOTAutograd with activation
# checkpointing, gradients of the residual stream are added in another order in every block: there plain
# `aot_eager` also differs from eager by up to 1.3e-2 (this Llama, bf16).  Inductor keeps fused values in
# fp32.  In these two cases the tolerance is four times as large.
RELATIVE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
# Relative to the distance that AdamW moved a parameter: AdamW magnifies the rounding of small gradients.
# Steps in bf16, not fp32, err by more than half: bf16 resolves 5e-4 in a weight of 0.1, AdamW moves by 1e-3.
MOVED_RELATIVE = 0.25
STEPS = 5


class _Cast:
    """Takes the model's place in `Case.loss`: runs the model with parameters and inputs cast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cast = {n: p.to(self._dtype) for n, p in self._model.named_parameters()}
        inputs = [a.to(self._dtype) if a.is_floating_point() else a for a in args]
        return functional_call(self._model, cast, tuple(inputs), kwargs)


def _averaged(grads: Sequence[Tensor], mesh: DeviceMesh | None, dtype: torch.dtype) -> Tensor:
    """Average each rank's gradient within nodes, round, average between nodes, round."""
    nodes, ranks_per_node = (1, 1) if mesh is None else mesh.mesh.shape
    sent = torch.stack(list(grads)).to(dtype).float()
    within = sent.unflatten(0, (nodes, ranks_per_node)).mean(1).to(dtype).float()
    return within.mean(0).to(dtype).float()


def _backward(
    plain: nn.Module,
    case: Case,
    batches: Sequence[Tensor],
    mesh: DeviceMesh | None,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> list[float]:
    trained = [p for p in plain.parameters() if p.requires_grad]
    losses, by_rank = [], []
    for ids in batches:
        loss = case.loss(_Cast(plain, param_dtype), ids)  # type: ignore[arg-type]
        by_rank.append(torch.autograd.grad(loss, trained))
        losses.append(loss.item())
    for parameter, grads in zip(trained, zip(*by_rank, strict=True), strict=True):
        parameter.grad = _averaged(grads, mesh, reduce_dtype)
    return losses


def _check(
    mesh: DeviceMesh | None,
    name: str,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    compute: str | None,
    is_checkpointed: bool,
) -> None:
    trial = Trial(case=name, compute=compute, is_checkpointed=is_checkpointed)
    mine = Sharded(mesh, trial, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    case, model = mine.case, mine.model
    plain = build(Trial(case=name))  # functional_call is over when a checkpoint recomputes
    start = values(plain)
    optimizers = [mine.optimizer, adamw(plain)]
    relative = RELATIVE[param_dtype] * (
        4 if compute == "inductor" or (compute and is_checkpointed) else 1
    )
    for step in range(STEPS):
        batches = mine.batches(step)
        loss = mine.loss(batches[mine.rank])
        loss.backward()
        expected = _backward(plain, case, batches, mesh, param_dtype, reduce_dtype or param_dtype)
        about = f"{name} in {param_dtype}, {reduce_dtype}, {compute}, step {step}"
        assert abs(loss.item() - expected[mine.rank]) <= relative * abs(expected[mine.rank]), about
        assert all(g.dtype is torch.float32 for g in gradients(model).values()), about
        if step == 0:  # later the parameters differ by roundings, too: `_check_moved` bounds these
            check_close(
                about, gradients(model), gradients(plain), floor=GRADIENT_FLOOR, relative=relative
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _check_moved(name, start, values(model), values(plain))


def _check_moved(
    about: str,
    start: dict[str, Tensor],
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
) -> None:
    """Compares the root mean squares of the error and of the distance moved."""
    moved = 0
    for name, value in expected.items():
        if not value.numel():
            continue
        distance, error = (
            (value - other).square().mean().sqrt().item() for other in (start[name], actual[name])
        )
        moved += distance > 0
        limit = MOVED_RELATIVE * max(distance, 0.1 * STEPS * LEARNING_RATE)
        assert error <= limit, (
            f"{about}: {name} moved by {distance:.1e}, with an error of {error:.1e}"
        )
    assert moved, "the control: training changes what is compared"


def _check_each(mesh: DeviceMesh | None, trials: list[tuple[Any, ...]]) -> None:
    for trial in trials:
        _check(mesh, *trial)


SMALL: list[tuple[Any, ...]] = [
    ("odd", torch.bfloat16, None, "eager", False),
    ("odd", torch.bfloat16, torch.float32, None, True),
    ("floats", torch.bfloat16, torch.float32, None, False),
    ("odd", torch.float16, None, "eager", False),
    ("floats", torch.float16, torch.float32, "eager", False),
    ("floats", torch.bfloat16, torch.float32, "inductor", False),
]
LARGE: list[tuple[Any, ...]] = [
    ("llama-lora", torch.bfloat16, torch.float32, "eager", True),
]


@pytest.mark.rare
def test_two_nodes_of_two() -> None:
    run(_check_each, SMALL, nodes=2, ranks_per_node=2)


@pytest.mark.rare
def test_two_nodes_of_one() -> None:
    run(_check_each, LARGE, nodes=2, ranks_per_node=1)


BATCHES = 6


def _error(
    mesh: DeviceMesh, case: str, reduce_dtype: torch.dtype | None, place: GradientOn | None
) -> tuple[float, float]:
    """The distance of some batches' bf16 gradients from the fp32 gradients, and the norm of the latter.

    place: where the gradients of all batches but the last accumulate; None: no `no_sync`.
    """
    strategy = Strategy.parse("fcdp")
    if place is not None:
        strategy = replace(strategy, gradient_on=place)
    trial = Trial(case=case, strategy=strategy)
    mine = Sharded(mesh, trial, param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for step in range(BATCHES):
        every = mine.batches(step)
        waits = place is not None and step < BATCHES - 1
        with fcdp_compile.no_sync(mine.model) if waits else nullcontext():
            mine.loss(every[mine.rank]).backward()
        for ids in every:
            (mine.case.loss(mine.plain, ids) / mine.ranks).backward()
    found, expected = gradients(mine.model), gradients(mine.plain)
    assert all(g.dtype is torch.float32 for g in found.values())
    error = sum((found[n] - g).square().sum().item() for n, g in expected.items())
    return error**0.5, sum(g.square().sum().item() for g in expected.values()) ** 0.5


def _compare_errors(mesh: DeviceMesh) -> None:
    for case, place in (("odd", GradientOn.HOST), ("floats", GradientOn.GPU)):
        for reduce_dtype in (None, torch.float32):
            each, norm = _error(mesh, case, reduce_dtype, None)
            mine, _ = _error(mesh, case, reduce_dtype, place)
            # A sum is rounded when it leaves the node and when it arrives, by 2**-9 of itself each time.
            # Rounding its parts one by one may lose less: the parts are smaller, and half of the errors
            # cancel.
            rounding = 2 * 2**-9 * norm if reduce_dtype is None else 1e-6 * norm
            assert mine <= each + rounding, f"{case}, {place}, {reduce_dtype}: {mine} after {each}"
            assert 0 < each < 2**-5 * norm, "the control: there is an error, and not a large one"


@pytest.mark.rare
def test_micro_batches_that_wait_lose_no_more_than_the_rounding_of_their_sum() -> None:
    run(_compare_errors, nodes=2, ranks_per_node=2)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["bf16", "fp32"])
def test_one_process(reduce_dtype: torch.dtype | None) -> None:
    _check(None, "odd", torch.bfloat16, reduce_dtype, "eager", False)


class _OwnFailure:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("not enough memory: you tried to allocate 64 bytes")


def _without_arithmetic(mesh: DeviceMesh, folder: str) -> None:
    """Frozen parameters of dtypes that Gloo lacks: their values reach every rank, and files."""
    for dtype in (torch.float8_e4m3fn, torch.int16, torch.uint16):

        def build(dtype: torch.dtype = dtype) -> Any:
            model: Any = nn.Linear(3, 2)
            for name, shape in (("uneven", (7, 3)), ("scalar", ())):
                value = torch.arange(1, 1 + math.prod(shape)).view(shape).float().to(dtype)
                model.register_parameter(name, nn.Parameter(value, requires_grad=False))
            return model

        whole, model, loaded = build(), *(fcdp_compile.shard(build(), mesh) for _ in range(2))
        loaded.uneven.zero_()
        loaded.load_state_dict(model.state_dict())
        fcdp_compile.save(f"{folder}/{dtype}", model)
        model.uneven.zero_()
        fcdp_compile.load(f"{folder}/{dtype}", model)
        for name in ("uneven", "scalar"):
            wanted = getattr(whole, name).float()
            for held in (getattr(model, name), getattr(loaded, name)):
                assert torch.equal(held.full_tensor().float(), wanted)
                assert torch.equal(fcdp_compile.full(held).float(), wanted)
        rows = model.uneven.redistribute(placements=[Replicate(), Shard(-1)]).to_local()
        mine = whole.uneven.float().chunk(2, -1)[model.uneven.device_mesh.get_local_rank(1)]
        assert torch.equal(rows.float(), mine)
    # An error of this rank's own is no lost rank, and the groups still work.
    own = pytest.raises(RuntimeError, match="Invalid scalar type")
    with own as raised, naming_lost_ranks(None, "a sum"):
        dist.all_reduce(torch.ones(2, dtype=torch.int16, device="cpu"))
    assert not isinstance(raised.value, LostRankError)
    with pytest.raises(RuntimeError, match="memory") as raised:
        finish(_OwnFailure(), None, Wait(lambda: "a gather"))  # type: ignore[arg-type]  # a stub
    assert not isinstance(raised.value, LostRankError)
    assert torch.equal(fcdp_compile.full(model.uneven).float(), whole.uneven.float())


def test_bytes_travel_as_bytes(tmp_path: Path) -> None:
    run(_without_arithmetic, str(tmp_path), nodes=2, ranks_per_node=2)


def _with_statistics() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(8 * 36, 10),
        nn.BatchNorm1d(10, affine=False),
    )


def _statistics_stay(mesh: DeviceMesh | None) -> None:
    inputs = torch.randn(6, 3, 8, 8, generator=seeded(1))
    for backend in (None, "fcdp"):
        whole = _with_statistics().bfloat16()
        for at in (1, 2, 5):
            whole[at].float()
        sharded = fcdp_compile.shard(_with_statistics(), mesh, param_dtype=torch.bfloat16)
        called = torch.compile(sharded, backend=backend) if backend else sharded
        for _ in range(2):
            for given, model in ((inputs.bfloat16(), whole), (inputs, called)):
                model(given).float().square().sum().backward()
        for mine, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            got = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
            torch.testing.assert_close(got, theirs.grad.float(), rtol=2**-7, atol=1e-3)
        assert all(map(torch.equal, sharded.buffers(), whole.buffers()))


@pytest.mark.slow
def test_layers_with_running_statistics_compute_in_their_dtype() -> None:
    _statistics_stay(None)
    run(_statistics_stay, nodes=2, ranks_per_node=2)
