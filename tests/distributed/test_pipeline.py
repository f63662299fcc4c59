"""Pipelines of sharded stages: numbers and bytes of one process with the whole model; what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleLoopedBFS
from torch.distributed.tensor import DTensor

import fcdp_compile
from fcdp_compile.errors import ArgumentError
from tests.distributed.pipelined import Pipeline, Trial, loss_of, pipeline_mesh
from tests.distributed.ranks import kill, run, start

pytestmark = pytest.mark.distributed

STEPS = 4
FULL = [Trial(schedule="1f1b"), Trial(schedule="interleaved"), Trial(schedule="gpipe", frozen=True)]
WITHIN = [Trial(frozen=True), Trial(checkpointed=True, given_shapes=True)]
SCHEDULES = ("1f1b", "gpipe", "interleaved")
MANY = [
    *(Trial(schedule=s, frozen=f) for s in SCHEDULES for f in (False, True)),
    *(Trial(strategy=s) for s in ("zero3", "zero++", "ddp", "mics")),
    Trial(compute=None, checkpointed=True),
    Trial(layered=True, checkpointed=True),
    Trial(compute="inductor", micro_batches=8),
]


# --- numbers ------------------------------------------------------------------------------------------


def _clip(pipeline: Pipeline, most: float) -> float:
    """Clip the gradients of all stages by their norm, as docs/pipelines.md does."""
    parameters = [p for m in pipeline.models for p in m.parameters()]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    squared = (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    dist.all_reduce(squared, group=pipeline.mesh.get_group("pp"))
    nn.utils.clip_grads_with_norm_(parameters, most, squared.sqrt())
    return squared.sqrt().item()


def _parity(mesh: DeviceMesh, trials: Sequence[Trial], nodes: int) -> None:
    own = pipeline_mesh(2, nodes)
    for trial in trials:
        pipeline = Pipeline(own, trial)
        for step in range(STEPS):
            loss = pipeline.backward(step)
            expected = pipeline.whole_backward(step)
            if own.get_local_rank("pp") == 1:
                assert loss == pytest.approx(expected, rel=1e-5), (trial, step)
            if step == 1:
                norm = nn.utils.clip_grad_norm_(pipeline.whole.parameters(), 0.1).item()
                assert _clip(pipeline, 0.1) == pytest.approx(norm, rel=1e-5), trial
            pipeline.optimize()
        for name, value in pipeline.parameters().items():
            other = pipeline.whole.get_parameter(name)
            assert torch.allclose(value, other, atol=1e-5, rtol=1e-5), (trial, name)


@pytest.mark.parametrize(
    ("trials", "nodes", "ranks_per_node"),
    [
        pytest.param(FULL, 4, 1, id="between nodes", marks=pytest.mark.slow),
        pytest.param(WITHIN, 2, 2, id="a node each", marks=pytest.mark.rare),
        pytest.param(FULL[:1], 1, 4, id="on one node", marks=pytest.mark.rare),
        pytest.param(FULL[:1], 2, 1, id="a rank each", marks=pytest.mark.slow),
        pytest.param(MANY, 4, 2, id="four nodes", marks=pytest.mark.rare),
    ],
)
def test_losses_and_parameters_are_those_of_the_whole_model(
    trials: Sequence[Trial], nodes: int, ranks_per_node: int
) -> None:
    run(_parity, trials, nodes, nodes=nodes, ranks_per_node=ranks_per_node)


# --- bytes --------------------------------------------------------------------------------------------


def _sent(pipeline: Pipeline, micro_batches: int, kind: Any = None) -> list[dict[str, int]]:
    """The bytes between nodes of an ordinary step."""
    schedule = pipeline.scheduled(micro_batches, kind)
    for step in range(2):  # the first one finds out shapes
        pipeline.backward(step, schedule, micro_batches)
        pipeline.optimize()
    return pipeline.between_nodes()


class _Plain(fcdp_compile.PipelineStage):
    """torch's own stage: every backward synchronises."""

    forward_one_chunk = pipelining.PipelineStage.forward_one_chunk
    backward_one_chunk = pipelining.PipelineStage.backward_one_chunk


def _bytes(mesh: DeviceMesh, trial: Trial) -> None:
    own = pipeline_mesh(2, 4)
    pipeline = Pipeline(own, trial)
    found = {n: _sent(pipeline, n) for n in (2, 4, 8)}
    assert found[4] == found[8] == found[2]
    shards = [sum(p.numel() for p in m.parameters()) * 4 for m in pipeline.models]
    for one, least in zip(found[4], shards, strict=True):
        # Half of the parameters, and padding; gradients once as well.
        assert least / 2 <= one["inter_all_gather"] == one["inter_reduce_scatter"] < least / 2 * 1.1
    if trial.schedule != "interleaved":
        alone = _sent(pipeline, 1, pipelining.ScheduleGPipe)
        assert alone == found[4]
        pipeline.stages[0].__class__ = _Plain
        (plain,) = _sent(pipeline, 4)
        assert plain["inter_reduce_scatter"] == 4 * found[4][0]["inter_reduce_scatter"]
        assert plain["inter_all_gather"] == found[4][0]["inter_all_gather"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.slow
def test_bytes_between_nodes_do_not_depend_on_micro_batches(schedule: str) -> None:
    run(_bytes, Trial(schedule=schedule), nodes=4, ranks_per_node=1)


def _frozen_bytes(mesh: DeviceMesh) -> None:
    """A frozen base crosses once in all; forwards that backwards repeat accumulate, too."""
    own = pipeline_mesh(2, 4)
    pipeline = Pipeline(own, Trial(frozen=True))
    adapters = sum(p.numel() for p in pipeline.models[0].parameters() if p.requires_grad) * 4
    for n in (2, 4):
        (one,) = _sent(pipeline, n)
        assert one["inter_all_gather"] == one["inter_reduce_scatter"] == adapters / 2
    pipeline = Pipeline(own, Trial(layered=True, checkpointed=True))
    assert _sent(pipeline, 2) == _sent(pipeline, 4)


@pytest.mark.rare
def test_bytes_of_frozen_bases_and_of_repeated_forwards() -> None:
    run(_frozen_bytes, nodes=4, ranks_per_node=1)


# --- stages apart -------------------------------------------------------------------------------------


def _apart(mesh: DeviceMesh) -> None:
    """Stages make their groups without each other, and have different numbers of models."""
    own = pipeline_mesh(2, 2)
    stage = own.get_local_rank("pp")
    for turn in range(2):
        if turn == stage:
            models = [fcdp_compile.shard(nn.Linear(4, 4 + i), own) for i in range(2 - stage)]
            for model in models:
                model(torch.ones(1, 4)).sum().backward()
                assert model.weight.full_tensor().shape == (4 + models.index(model), 4)
        dist.barrier()
    # Evaluation between steps, and a schedule without a loss.
    pipeline = Pipeline(own, Trial())
    pipeline.backward(0)
    pipeline.optimize()
    ids, targets = pipeline.batch(1, pipeline.replica, 2)
    schedule = pipeline.scheduled(2)  # not as many micro-batches as in the step before
    outputs = schedule.eval(*([ids] if stage == 0 else []), target=targets)
    before = pipeline.backward(1, pipeline.scheduled(2), 2)
    if stage == 1:
        assert loss_of(outputs, targets).item() == pytest.approx(before, rel=1e-5)


@pytest.mark.rare
def test_stages_are_sharded_at_different_times_and_evaluated() -> None:
    run(_apart, nodes=2, ranks_per_node=2)


def _saved(mesh: DeviceMesh, folder: str) -> None:
    own = pipeline_mesh(2, 4)
    first, second = Pipeline(own, Trial()), Pipeline(own, Trial())
    where = Path(folder, f"stage{first.indices[0]}")
    first.backward(0)
    first.optimize()
    fcdp_compile.save(where, model=first.models[0], optimizer=first.optimizer, step=0)
    loaded = fcdp_compile.load(where, model=second.models[0], optimizer=second.optimizer)
    assert loaded.step == 0
    for pipeline in (first, second):
        pipeline.backward(1)
        pipeline.optimize()
    values, others = first.parameters(), second.parameters()
    assert [n for n, value in values.items() if not torch.equal(value, others[n])] == []


@pytest.mark.rare
def test_each_stage_has_a_checkpoint(tmp_path: Path) -> None:
    run(_saved, str(tmp_path), nodes=4, ranks_per_node=1)


# --- mistakes and lost ranks --------------------------------------------------------------------------


def _refused(match: str, act: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError, match=match):
        act()


def _refusals(mesh: DeviceMesh) -> None:
    make, rank = fcdp_compile.make_mesh, dist.get_rank()
    _refused("pp=3 must be a whole number that divides the 2 nodes", lambda: make(2, pp=3))
    _refused("pp=3 must be a whole number that divides the 4 ranks of", lambda: make(1, pp=3))
    _refused("rank 0 has pp=1 and rank 1 has pp=2", lambda: make(2, pp=1 + (rank == 1)))
    own = pipeline_mesh(2, 2)
    index, groups = own.get_local_rank("pp"), (own.get_group("pp"), None)
    stage = fcdp_compile.PipelineStage
    _refused("is not sharded", lambda: stage(nn.Linear(2, 2), index, 2))
    whole = fcdp_compile.shard(nn.Linear(2, 2), mesh)
    for group in groups:
        match = r"over ranks \[0, 1, 2, 3\], but rank \d belongs to another stage"
        _refused(match, lambda group=group: stage(whole, index, 2, group=group))  # type: ignore[misc]


def _refused_schedule(mesh: DeviceMesh, kind: Callable[..., Any]) -> str:
    # torch itself refuses to cut the backward of what is compiled.
    compute = "eager" if kind is ScheduleLoopedBFS else None
    pipeline = Pipeline(pipeline_mesh(2, 2), Trial(schedule="interleaved", compute=compute))
    schedule = pipeline.scheduled(4, kind)
    with pytest.raises((ArgumentError, RuntimeError)) as caught:
        pipeline.backward(0, schedule)
    # The ranks of the last stage are refused and leave; then the transfers of the others fail.
    return str(caught.value)


def test_what_is_refused() -> None:
    run(_refusals, nodes=2, ranks_per_node=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (ScheduleLoopedBFS, "does not run backwards in the order of micro-batches"),
        (ScheduleInterleavedZeroBubble, "computes gradients of inputs and of weights apart"),
    ],
)
def test_other_schedules_are_refused(kind: Callable[..., Any], match: str) -> None:
    assert match in run(_refused_schedule, kind, nodes=2, ranks_per_node=1)[1]


def _dies(mesh: DeviceMesh) -> str:
    own = pipeline_mesh(2, 2)
    # Not compiled: a compilation may take longer than ranks wait.
    pipeline = Pipeline(own, Trial(compute=None))
    if dist.get_rank() == 3:
        pipeline.stages[0].backward_one_chunk = _die  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        pipeline.backward(0)
    return f"{caught.typename}: {caught.value}"


def _die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_lost_rank_is_named_within_its_stage() -> None:
    processes, pipes = start(_dies, nodes=2, ranks_per_node=2, wait_s=10.0)
    try:
        answers = []
        for rank in range(3):
            assert pipes[rank].poll(120), f"rank {rank} waits"
            answers.append(pipes[rank].recv()[1])
    finally:
        kill(processes)
    assert answers[2].startswith("LostRankError"), answers
    assert "rank 3 did not join" in answers[2], answers
