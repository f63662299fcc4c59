"""Jobs that are killed go on from the memory of their nodes, with the values of jobs that are not."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from tests.distributed.parity import Sharded, Trial, values, whole
from tests.distributed.ranks import run
from tests.marks import quick

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.distributed

STEPS = 6


class Trained(NamedTuple):
    """What one life of a job has seen, on one rank.

    losses: by step.  step, extra: the keeper's at the start.  is_loaded: whether it asked for first values.
    sent: bytes between nodes in the first step's gathers.  first, last: values at the start and at the end.
    """

    losses: dict[int, float]
    step: int
    extra: Any
    is_loaded: bool
    sent: int
    first: dict[str, Array]
    last: dict[str, Array]


def _train(
    mesh: DeviceMesh | None,
    steps: int,
    every: int = 1,
    *,
    ends: bool = True,
    case: str = "odd-lora",
) -> Trained:
    mine = Sharded(mesh, Trial(case=case))
    start = {n: p.detach().clone() for n, p in mine.plain.named_parameters()}
    with torch.no_grad():
        for parameter in mine.model.parameters():  # values that no restart may leave
            parameter.mul_(3.0)
    loads = []

    def base() -> None:
        loads.append(True)
        mine.model.load_state_dict(start, strict=False)

    keeper = fcdp_compile.survive(mine.model, mine.optimizer, base=base, every=every, job="test")
    step, extra, first = keeper.step, keeper.extra, _values(mine)
    losses, sent, frozen = {}, 0, []
    for number in range(step, steps):
        ids = mine.batches(number)[mine.rank]
        ids = ids[:, int(torch.randint(0, 3, ())) :]  # of the generator that goes on
        loss = mine.loss(ids)
        loss.backward()
        mine.step()
        losses[number] = loss.item()
        if number == step:
            sent = state_of(mine.model).counters.sent.get("inter_all_gather", 0)
        keeper.commit(extra={"next": number + 1})
        frozen.append(keeper._frozen)
    assert len(set(map(id, frozen))) <= 1, "frozen parameters are kept once"
    if ends:
        keeper.close()
    else:
        keeper._pending.wait()
    return Trained(losses, step, extra, bool(loads), sent, first, _values(mine))


def _values(mine: Sharded) -> dict[str, Array]:
    """Parameters, and the optimizer's moments."""
    found = values(mine.model)
    for name, parameter in mine.model.named_parameters():
        for key, moment in mine.optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = whole(moment)
    return {name: value.numpy() for name, value in found.items()}


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FCDP_NODE_MEMORY", str(tmp_path))
    return tmp_path


def _job(memory: Path) -> Path:
    (folder,) = memory.glob("fcdp-*-test")
    return folder


def _same(a: dict[str, Array], b: dict[str, Array]) -> bool:
    return a.keys() == b.keys() and all(map(np.array_equal, a.values(), b.values()))


def _replicated(mesh: DeviceMesh, strategy: str, case: str) -> tuple[int, dict[str, Array]]:
    """One life of a job: the step that it begins with, and the values after the first step."""
    mine = Sharded(mesh, Trial(case=case, strategy=strategy))
    keeper = fcdp_compile.survive(mine.model, mine.optimizer, job=f"{strategy}-{case}")
    step, first = keeper.step, _values(mine)
    mine.loss(mine.batches(step)[mine.rank]).backward()
    mine.step()
    keeper.commit()
    keeper._pending.wait()
    last = _values(mine)
    return (step, first) if step else (step, last)


def _in_turn(mesh: DeviceMesh) -> list[tuple[int, dict[str, Array]]]:
    pairs = [("ddp", "odd"), ("mics", "odd"), ("fcdp", "odd"), ("ddp", "odd-lora")]
    return [_replicated(mesh, *pair) for pair in pairs]


def test_rows_that_few_nodes_have_written(memory: Path) -> None:
    """Three nodes: a node's memory lacks what the node after it has written for all."""
    before, after = (run(_in_turn, nodes=3, ranks_per_node=1)[0] for _ in range(2))
    for (_, expected), (step, found) in zip(before, after, strict=True):
        assert step == 1
        assert _same(found, expected)


def test_the_same_nodes_go_on(memory: Path) -> None:
    shape = {"nodes": 2, "ranks_per_node": 2}
    undisturbed = run(_train, STEPS, **shape)
    assert not any(memory.iterdir())
    run(partial(_train, ends=False), 3, **shape)
    for one, other in zip(run(_train, STEPS, **shape), undisturbed, strict=True):
        assert (one.step, one.extra, one.is_loaded) == (3, {"next": 3}, False)
        assert one.losses == {k: v for k, v in other.losses.items() if k >= 3}
        assert _same(one.last, other.last)
        assert one.sent < other.sent
    assert not any(memory.iterdir())


# --- what a restart finds ---------------------------------------------------------------------------------


def _lose(memory: Path, node: int) -> None:
    """A node is gone; those after it have lower numbers now."""
    job = _job(memory)
    shutil.rmtree(job / f"node-{node}")
    for later in itertools.count(node + 1):
        if not (job / f"node-{later}").exists():
            break
        (job / f"node-{later}").rename(job / f"node-{later - 1}")


def _replace(memory: Path, node: int) -> None:
    """A node is gone, and another machine has its number."""
    shutil.rmtree(_job(memory) / f"node-{node}")


def _newest(memory: Path) -> str:
    """The folder of the newest step."""
    found = (_job(memory) / "node-0").glob("steps/*")
    return f"steps/{max(path.name for path in found)}"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def _damage(memory: Path, folder: str, file: str = "*.safetensors", node: str = "*") -> None:
    """A bit of each file of a folder flips, on every node or on one."""
    for path in _job(memory).glob(f"node-{node}/{folder}/**/{file}"):
        _flip(path)


def _half(memory: Path) -> None:
    """The newest step is as if every node had been killed while it was written."""
    for path in _job(memory).glob(f"node-*/{_newest(memory)}/checkpoint.json"):
        path.unlink()


CHANGES: dict[str, tuple[Callable[[Path], object], int, int]] = {
    "another number": (lambda memory: None, 1, 3),
    "more nodes": (lambda memory: None, 3, 3),
    "the first node is gone": (lambda memory: _lose(memory, 0), 1, 3),
    "the last node is gone": (lambda memory: _lose(memory, 1), 1, 3),
    "the first node is another": (lambda memory: _replace(memory, 0), 2, 3),
    "the last node is another": (lambda memory: _replace(memory, 1), 2, 3),
    "a step is half written": (_half, 2, 2),
    "a step is damaged": (lambda memory: _damage(memory, _newest(memory)), 2, 2),
    "a record is damaged": (lambda memory: _damage(memory, _newest(memory), "*.json"), 2, 2),
    "frozen values are damaged": (lambda memory: _damage(memory, "frozen"), 2, 0),
    "one node is damaged": (lambda memory: _damage(memory, "*", node="1"), 2, 3),
    "everything is gone": (lambda memory: (_replace(memory, 0), _replace(memory, 1)), 2, 0),
}
"""What happens to the memory of two nodes, how many nodes go on, and from which step."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Trained]]]:
    """The memory of a job that two nodes have left after three steps, and what they have seen."""
    folder = tmp_path_factory.mktemp("memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FCDP_NODE_MEMORY", str(folder))
        earlier = run(partial(_train, ends=False), 2, nodes=2, ranks_per_node=1)
        latest = run(partial(_train, ends=False), 3, nodes=2, ranks_per_node=1)
        yield folder, [earlier[0], latest[0]]


_QUICK = ("the first node is gone", "the last node is another", "one node is damaged")


@pytest.mark.parametrize("change", quick(list(CHANGES), *_QUICK))
def test_what_is_left(change: str, killed: tuple[Path, list[Trained]], memory: Path) -> None:
    folder, (earlier, latest) = killed
    shutil.copytree(folder, memory, dirs_exist_ok=True)
    act, nodes, step = CHANGES[change]
    act(memory)
    for one in run(_train, 4, nodes=nodes, ranks_per_node=1):
        assert (one.step, one.is_loaded) == (step, not step)
        expected = {3: latest.last, 2: earlier.last, 0: earlier.first}[step]
        assert _same(one.first, expected)
        assert list(one.losses) == list(range(step, 4))
    assert not any(memory.iterdir())
