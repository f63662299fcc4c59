"""Files of models whose parameters ranks of a node share ("tp") are those of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

import fcdp_compile
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.pretrained import load
from fcdp_compile.models.pretrained.source import Files
from tests.device.choice import seeded
from tests.distributed.cut_models import (
    VOCABULARY,
    Cut,
    Stack,
    declared,
    llama,
    lora,
    mixtral,
    with_experts,
)
from tests.distributed.exports import compare, saved, tensors_of
from tests.distributed.jobs_checkpoint import assert_same
from tests.distributed.parity import whole
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

CASES: dict[str, tuple[Callable[[], nn.Module], Cut]] = {
    "full": (llama, fcdp_compile.tensor_parallel),
    "tied": (partial(llama, tie_word_embeddings=True), fcdp_compile.tensor_parallel),
    "mixture": (mixtral, fcdp_compile.tensor_parallel),
    "experts": (mixtral, with_experts),
    "declared parts": (Stack, declared),
    "LoRA": (lora, fcdp_compile.tensor_parallel),
}


class Job:
    """A model with AdamW on a mesh; every rank has the same batches."""

    def __init__(
        self, mesh: DeviceMesh | None, case: str, *, tp: int, seed: int = 0, **options: Any
    ) -> None:
        make, cut = CASES[case]
        torch.manual_seed(seed)
        on = fcdp_compile.make_mesh(nodes=2, tp=2) if tp > 1 else mesh
        model = cut(make(), on) if tp > 1 else make()
        self.model: Any = fcdp_compile.shard(model, on, **options)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=1e-2
        )
        self.steps = 0

    def step(self) -> float:
        generator = seeded(self.steps)
        ids = torch.randint(VOCABULARY, (2, 16), generator=generator)
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.item()

    def values(self) -> dict[str, Tensor]:
        """Parameters and moments, whole."""
        found = {n: whole(p) for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{key} of {name}"] = whole(value)
        return found

    def save(self, folder: str, **options: Any) -> None:
        fcdp_compile.save(
            folder, self.model, optimizer=self.optimizer, step=self.steps, **options
        ).wait()

    def load(self, folder: str) -> Job:
        loaded = fcdp_compile.load(folder, self.model, optimizer=self.optimizer)
        assert loaded.step is not None
        self.steps = loaded.step
        return self


def _moves(mesh: DeviceMesh, folder: str, case: str) -> None:
    """tp=2 -> tp=2, tp=1 -> tp=2."""
    job = Job(mesh, case, tp=2)
    for _ in range(2):
        job.step()
    job.save(f"{folder}/parts")
    values, losses = job.values(), [job.step() for _ in range(2)]
    again = Job(mesh, case, tp=2, seed=1).load(f"{folder}/parts")
    assert_same(again.values(), values)
    assert [again.step() for _ in range(2)] == losses, "bit by bit"

    plain = Job(mesh, case, tp=1, seed=1).load(f"{folder}/parts")
    assert_same(plain.values(), values)
    plain.save(f"{folder}/whole", asynchronous=True)
    assert [plain.step() for _ in range(2)] == pytest.approx(losses, rel=1e-5)

    back = Job(mesh, case, tp=2, seed=1, strategy="mics").load(f"{folder}/whole")
    assert_same(back.values(), values)
    back.save(f"{folder}/parts", asynchronous=True)
    assert [back.step() for _ in range(2)] == pytest.approx(losses, rel=1e-5)
    assert_same(Job(mesh, case, tp=2, seed=1).load(f"{folder}/parts").values(), values)


def _checkpoints(mesh: DeviceMesh, folder: str) -> None:
    for case in ("mixture", "experts", "declared parts"):
        _moves(mesh, f"{folder}/{case}", case)
    # The parts of experts of one job, and whole experts of the other one, are parts of the same parameters.
    values = Job(mesh, "mixture", tp=2).load(f"{folder}/mixture/parts").values()
    assert_same(Job(mesh, "experts", tp=2).load(f"{folder}/mixture/parts").values(), values)


@pytest.mark.rare
def test_checkpoints_move_between_layouts(tmp_path: Path) -> None:
    run(_checkpoints, str(tmp_path), nodes=2, ranks_per_node=2)


def _frozen(mesh: DeviceMesh, folder: str) -> None:
    """A frozen base that is left out is compared on any layout; adapters move; all ranks agree."""
    job = Job(mesh, "LoRA", tp=2)
    job.step()
    job.save(folder, frozen=False)
    values = job.values()
    with pytest.raises(CheckpointError, match="ranks 0 and 3 are about to save different things"):
        fcdp_compile.save(folder, job.model, step=int(dist.get_rank() == 3))
    for tp in (1, 2):
        assert_same(Job(mesh, "LoRA", tp=tp).load(folder).values(), values)
        other = Job(mesh, "LoRA", tp=tp)
        name = "base_model.model.model.layers.1.mlp.down_proj.base_layer.weight"
        base = dict(other.model.named_parameters())[name]
        with torch.no_grad():
            base.mul_(2)
        with pytest.raises(CheckpointError, match=r"1 of the .* frozen parameters") as refused:
            other.load(folder)
        assert name in str(refused.value)


@pytest.mark.slow
def test_a_frozen_base_may_be_left_out(tmp_path: Path) -> None:
    run(_frozen, str(tmp_path), nodes=2, ranks_per_node=2)


def _exports(mesh: DeviceMesh, folder: str) -> None:
    """Files and streams of a model in parts are those of the plain model, and a model in parts reads them."""
    on = fcdp_compile.make_mesh(nodes=2, tp=2)
    for case in ("full", "tied", "mixture", "experts", "declared parts"):
        make, cut = CASES[case]
        torch.manual_seed(0)
        plain = make()
        model = fcdp_compile.shard(cut(copy.deepcopy(plain), on), on)
        ours, theirs = Path(folder, case, "ours"), Path(folder, case, "theirs")
        fcdp_compile.save_pretrained(model, ours)
        dist.barrier()
        _same_stream(model, ours)
        if dist.get_rank() == 0:
            _same_files(plain, ours, theirs)
        _reads(case, ours, plain, on)


def _same_files(plain: Any, ours: Path, theirs: Path) -> None:
    if isinstance(plain, PreTrainedModel | PeftModel):
        compare(ours, saved(plain, theirs))
    else:
        assert_same(_tensors(ours), plain.state_dict())


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name.partition(": ")[2]: t for name, t in tensors_of(folder).items()}


def _same_stream(model: nn.Module, folder: Path, **options: Any) -> None:
    """Only rank 1 asks for tensors."""
    found = {
        name: tensor.clone()
        for bucket in fcdp_compile.stream_state(model, bucket_bytes=20_000, on=[1], **options)
        for name, tensor in bucket
    }
    assert_same(found, _tensors(folder) if dist.get_rank() == 1 else {})


def _reads(case: str, folder: Path, plain: nn.Module, on: DeviceMesh | None) -> None:
    """A model on meta, cut and sharded, gets the files' values, or the initial values of the plain model."""
    make, cut = CASES[case]
    with torch.device("meta"):
        empty, again = make(), make()
    model = fcdp_compile.shard(cut(empty, on), on)
    made: list[Files] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "Files", lambda: made.append(Files()) or made[-1])
        fcdp_compile.load_pretrained(model, folder)
    own_bytes = sum(p.to_local().nbytes for p in model.parameters())
    assert [files.read_bytes for files in made] == [own_bytes], "no other rank's part"
    fcdp_compile.materialize(model)  # buffers
    wanted = dict(plain.named_parameters())
    assert_same({n: whole(p) for n, p in model.named_parameters()}, wanted)
    initial = fcdp_compile.shard(cut(again, on), on)
    torch.manual_seed(0)
    fcdp_compile.materialize(initial)
    assert_same({n: whole(p) for n, p in initial.named_parameters()}, wanted)


def _adapters(mesh: DeviceMesh, folder: str) -> None:
    """Adapters alone, and merged; a base from files under adapters that have values."""
    on = fcdp_compile.make_mesh(nodes=2, tp=2)
    torch.manual_seed(0)
    plain: Any = lora()
    model: Any = fcdp_compile.shard(
        fcdp_compile.tensor_parallel(copy.deepcopy(plain), on), on, strategy="mics"
    )
    alone, merged = Path(folder, "alone"), Path(folder, "merged")
    fcdp_compile.save_pretrained(model, alone)
    fcdp_compile.save_pretrained(model, merged, merge=True)
    model.save_pretrained(str(Path(folder, "own")))
    dist.barrier()
    _same_stream(model, alone, only="adapters")
    _same_stream(model, merged)
    if dist.get_rank() == 0:
        compare(alone, saved(plain, Path(folder, "theirs")))
        compare(alone, Path(folder, "own"))
        base = copy.deepcopy(plain).merge_and_unload()
        compare(merged, saved(base, Path(folder, "theirs merged")))
    before = {n: whole(p) for n, p in model.named_parameters() if "lora" in n}
    fcdp_compile.load_pretrained(model, merged)
    read = {n.replace("base_layer.", ""): whole(p) for n, p in model.named_parameters()}
    wanted = {f"base_model.model.{n}": t for n, t in _tensors(merged).items()}
    assert_same({n: t for n, t in read.items() if "lora" not in n}, wanted)
    assert_same({n: t for n, t in read.items() if "lora" in n}, before)


@pytest.mark.slow
@pytest.mark.parametrize("check", [_exports, _adapters], ids=["models", "adapters"])
def test_files_of_hugging_face_are_whole(check: Callable[..., None], tmp_path: Path) -> None:
    run(check, str(tmp_path), nodes=2, ranks_per_node=2)
