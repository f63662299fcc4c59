"""Home shards that are split over a node alone, or not at all: every node, or every rank, has a copy."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import fcdp_compile
from fcdp_compile import StaleParameterError
from tests.distributed.beside import Beside, assert_close, sgd, whole
from tests.distributed.models import CASES
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

PLACEMENTS = {
    "ddp": (Replicate(), Replicate()),
    "mics": (Shard(0), Replicate()),
    "paro-nii": (Shard(0), Replicate()),
}


def _copies_are_equal(model: nn.Module) -> None:
    """All ranks that hold the same part must have equal bits; every rank must call this."""
    for name, parameter in model.named_parameters():
        mine = parameter.detach().to_local().clone()
        replicated = [
            parameter.device_mesh.get_group(dim)
            for dim, placement in enumerate(parameter.placements)
            if placement.is_replicate()
        ]
        for group in replicated:
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, mine.contiguous(), group=group)
            assert all(torch.equal(p, mine) for p in parts), name


def _clip(pair: Beside) -> None:
    """Clip the gradients of both sides to one norm."""
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in pair.both]
    assert_close(whole(norms[0]), norms[1], "norm of the gradients")


def _train(mesh: DeviceMesh, strategy: str, case: str) -> None:
    pair = Beside(mesh, CASES[case], strategy=strategy)
    kinds = [type(p) for p in next(iter(pair.model.parameters())).placements]
    assert kinds == [type(p) for p in PLACEMENTS[strategy]]
    for _ in range(3):
        pair.case.loss(pair.net, pair.data(pair.step)).backward()
        pair.plain_backward(pair.step)
        pair.compare_gradients()
        _clip(pair)
        pair.optimize()
        pair.step += 1
    # Not compiled, and evaluation.
    pair.case.loss(pair.model, pair.data(pair.step)).backward()
    pair.plain_backward(pair.step)
    pair.compare_gradients()
    pair.optimize()
    with torch.no_grad():
        loss, expected = pair.losses(pair.step)
        assert_close(loss, expected, "evaluation")
    # Written to from outside, and trained on.
    with torch.no_grad():
        for model in pair.both:
            for parameter in model.parameters():
                parameter.mul_(1.25)
    pair.train(2)
    _through_a_checkpoint(pair)
    pair.train(2)
    pair.compare_parameters()
    _copies_are_equal(pair.model)


def _through_a_checkpoint(pair: Beside) -> None:
    """Save shards, change the parameters, load the shards."""
    model_state, optimizer_state = copy.deepcopy(get_state_dict(pair.model, pair.optimizer))
    with torch.no_grad():
        for parameter in pair.model.parameters():
            parameter.fill_(7.0)
    set_state_dict(
        pair.model,
        pair.optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
    )


def _refuse(mesh: DeviceMesh, strategies: tuple[str, ...]) -> None:
    """Refuse an optimizer step between a forward and its backward, which autograd would not notice."""
    for strategy in strategies:
        pair = Beside(mesh, CASES["odd"], strategy=strategy)
        pair.train(1)
        loss = pair.case.loss(pair.net, pair.data(5))
        pair.case.loss(pair.net, pair.data(6)).backward()
        pair.optimizer.step()
        with pytest.raises(StaleParameterError):
            loss.backward()


def _reshard(mesh: DeviceMesh) -> None:
    """FSDP's option: equal numbers, and a backward does not gather again what stayed on the device."""
    gathered = {}
    for option in (True, False, 2):
        pair = Beside(mesh, CASES["odd"], strategy="fsdp", reshard_after_forward=option)
        pair.train(3)
        pair.compare_parameters()
        moved = pair.counters.last_step
        gathered[option] = moved["inter_all_gather"], moved["intra_all_gather"]
    between, within = gathered[False]
    assert gathered[2] == (between, 2 * within)
    assert gathered[True][0] > between
    with pytest.raises(ValueError, match="is an option of strategy 'fsdp', not of 'fcdp'"):
        fcdp_compile.shard(nn.Linear(2, 2), mesh, reshard_after_forward=True)


def _run_all(mesh: DeviceMesh) -> None:
    _reshard(mesh)
    for strategy in PLACEMENTS:
        _train(mesh, strategy, "floats")
    _refuse(mesh, ("ddp", "mics"))  # paro-nii still has the parameters that the forward used


@pytest.mark.slow
def test_training_saving_and_writing() -> None:
    run(_run_all, nodes=2, ranks_per_node=2)


def _one_rank_a_node(mesh: DeviceMesh) -> None:
    """Each rank's home shards are whole parameters, and nothing else is kept of a forward."""
    _refuse(mesh, ("mics", "paro-nii", "paro-nni"))
    pair = Beside(mesh, CASES["odd"], strategy="paro-nii", optimizer=sgd)
    pair.train(3)
    pair.compare_parameters()
    _copies_are_equal(pair.model)


@pytest.mark.slow
def test_one_rank_a_node_keeps_no_second_copy() -> None:
    run(_one_rank_a_node, nodes=2, ranks_per_node=1)


def test_one_node_has_no_other_to_keep_a_copy_on() -> None:
    run(_one_node, nodes=1, ranks_per_node=2)


def _one_node(mesh: DeviceMesh) -> None:
    for strategy in ("mics", "hsdp", "paro-nii"):
        with pytest.raises(ValueError, match="there is one node; use 'zero3'"):
            fcdp_compile.shard(nn.Linear(2, 2), mesh, strategy=strategy)
    pair = Beside(mesh, CASES["odd"], strategy="ddp", optimizer=sgd)
    pair.train(2)
    pair.compare_parameters()
