"""`save_pretrained` writes the files of Transformers and PEFT, bit by bit, and both can read them."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

import fcdp_compile
from fcdp_compile.core.params.home_shard import HomeShard
from fcdp_compile.errors import FcdpError
from fcdp_compile.models.pretrained.exporting import export
from fcdp_compile.torch_compat import DispatchMode, tree_leaves
from fcdp_compile.torch_compat.tensors import storage_id
from tests.distributed.beside import whole
from tests.distributed.exports import (
    ADAPTED,
    MODELS,
    PROMPTS,
    compare,
    compare_tensors,
    llama,
    llama_tied,
    make,
    mixtral,
    rank,
    same_bytes,
    same_logits,
    saved,
    shared_folder,
    train,
)
from tests.distributed.jobs import WORKS, Job, asked, message_of, run_jobs
from tests.distributed.models import Odd
from tests.distributed.refused_saves import (
    disk_full,
    no_folder,
    one_rank_fails,
    others_ask_for_another,
    own_methods,
    values_that_are_not_there,
)
from tests.distributed.released import frozen_of, held_bytes

pytestmark = pytest.mark.distributed


def _model(mesh: DeviceMesh | None, name: str, max_shard_bytes: int) -> None:
    folder, plain = shared_folder(mesh), make(MODELS[name])
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh)
    fcdp_compile.save_pretrained(model, folder / "ours", max_shard_bytes=max_shard_bytes)
    _same_by_own_method(mesh, model, folder, max_shard_size=max_shard_bytes)
    if rank() == 0:
        theirs = saved(plain, folder / "theirs", max_shard_size=max_shard_bytes)
        compare(folder / "ours", theirs)
        back = type(plain).from_pretrained(folder / "ours", dtype=plain.dtype)
        for (key, found), (other, expected) in zip(
            back.state_dict().items(), plain.state_dict().items(), strict=True
        ):
            assert key == other
            assert torch.equal(found, expected), key


def _same_by_own_method(mesh: DeviceMesh | None, model: Any, folder: Path, **options: Any) -> None:
    """`model.save_pretrained` writes equal files; in one process Transformers' or PEFT's own bytes."""
    if mesh is not None:
        model.save_pretrained(str(folder / "own"), is_main_process=not rank(), **options)
        if rank() == 0:
            same_bytes(folder / "own", folder / "ours")


def _adapter(mesh: DeviceMesh | None, name: str) -> None:
    """Train an adapter two steps and save it; PEFT reads it into a base of its own."""
    folder, plain = shared_folder(mesh), make(ADAPTED[name])
    base = copy.deepcopy(plain.base_model) if name in PROMPTS else copy.deepcopy(plain).unload()
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh)
    train(model, plain)
    fcdp_compile.save_pretrained(model, folder / "ours")
    _same_by_own_method(mesh, model, folder)
    if rank() == 0:
        compare(folder / "ours", saved(plain, folder / "theirs"))
        back = peft.PeftModel.from_pretrained(base, folder / "ours")
        same_logits(back, plain)


def _merged(mesh: DeviceMesh | None, name: str) -> None:
    folder, plain = shared_folder(mesh), make(ADAPTED[name])
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh)
    train(model, plain)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    fcdp_compile.save_pretrained(model, folder / "ours", merge=True)
    for n, p in model.named_parameters():
        assert torch.equal(p.to_local() if mesh else p, before[n].to_local() if mesh else before[n])
    if rank() == 0:
        merged = copy.deepcopy(plain).merge_and_unload()
        compare(folder / "ours", saved(merged, folder / "theirs"))
        same_logits(type(merged).from_pretrained(folder / "ours"), merged)


def _prompts_are_not_merged(mesh: DeviceMesh | None) -> None:
    folder = shared_folder(mesh)
    model = fcdp_compile.shard(make(ADAPTED["prompt"]), mesh)
    save = partial(fcdp_compile.save_pretrained, model, folder / "new", merge=True)
    assert "type PROMPT_TUNING do not change the base's weights" in message_of(FcdpError, save)
    assert os.listdir(folder) == []


def _embeddings_that_were_tied(mesh: DeviceMesh | None) -> None:
    """The trained head is a copy: a reader of the merged base must not replace the head by the embedding."""
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    folder, plain = shared_folder(mesh), make(lambda: peft.get_peft_model(llama_tied(), config))
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh)
    train(model, plain)
    fcdp_compile.save_pretrained(model, folder / "ours", merge=True)
    if rank() == 0:
        back = type(plain.get_base_model()).from_pretrained(folder / "ours")
        same_logits(back, plain.merge_and_unload())


def _plain_module(mesh: DeviceMesh | None) -> None:
    folder, plain = shared_folder(mesh), make(Odd)
    plain.register_buffer("steps", torch.tensor(7))
    plain.again = plain.embedding
    fcdp_compile.save_pretrained(fcdp_compile.shard(copy.deepcopy(plain), mesh), folder / "ours")
    if rank() == 0:
        found, expected = load_file(folder / "ours" / "model.safetensors"), plain.state_dict()
        assert set(found) == set(expected)
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name


def _own_tie(mesh: DeviceMesh | None) -> None:
    """A weight tied by the user, not by the configuration, is saved under both names."""
    folder, plain = shared_folder(mesh), make(llama)
    plain.lm_head.weight = plain.model.embed_tokens.weight
    fcdp_compile.save_pretrained(fcdp_compile.shard(copy.deepcopy(plain), mesh), folder / "ours")
    if rank() == 0:
        back = type(plain).from_pretrained(folder / "ours")
        same_logits(back, plain)


def _other_homes(mesh: DeviceMesh) -> None:
    """Parameters with a copy on every rank, or on every node."""
    folder, plain = shared_folder(mesh), make(llama)
    rules = {"model.embed_tokens": "ddp", "lm_head": "zero3"}
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh, strategy="mics", module_strategies=rules)
    fcdp_compile.save_pretrained(model, folder / "ours")
    if rank() == 0:
        compare(folder / "ours", saved(plain, folder / "theirs"))


class _Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def _compiled_and_released(mesh: DeviceMesh) -> None:
    """Released shards stay on the host, and yet the export has their values."""
    folder, plain = shared_folder(mesh), make(ADAPTED["lora"])
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh)
    net: Any = torch.compile(model, backend="fcdp")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        net(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.square().mean().backward()
        optimizer.step()
    released = [n for n, p in frozen_of(model).items() if p.held.numel() and not held_bytes(p)]
    assert released
    fcdp_compile.save_pretrained(net, folder / "ours", merge=True, tokenizer=_Tokenizer())
    assert not any(held_bytes(p) for n, p in frozen_of(model).items() if n in released)
    values = {n: p.full_tensor() for n, p in model.named_parameters()}
    plain.load_state_dict(values, strict=False)
    if rank() == 0:
        saved(plain.merge_and_unload(), folder / "theirs")
        (folder / "theirs" / "tokenizer.json").write_text("{}")
        compare(folder / "ours", folder / "theirs")


class _LiveBytes(DispatchMode):
    """Counts the peak bytes of held tensors that operations made, besides the model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.peak = 0
        self._own = {
            storage_id(p.held if isinstance(p, HomeShard) else p) for p in model.parameters()
        }
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is torch.Tensor and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage_id(tensor) not in self._own:
                    self._living[storage_id(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self._living = {k: (ref, b) for k, (ref, b) in self._living.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._living.values()))
        return result


def _memory(mesh: DeviceMesh | None) -> None:
    """The writer holds no more than it writes: the model (more if experts are split), or the adapters."""
    for name, build in (("llama", llama), ("mixtral", mixtral), ("lora", ADAPTED["lora"])):
        folder, plain = shared_folder(mesh), make(build)
        largest = max(p.nbytes for p in plain.parameters())
        adapters = sum(p.nbytes for n, p in plain.named_parameters() if "lora_" in n)
        whole_bytes = adapters or sum(p.nbytes for p in plain.parameters())
        experts = sum(p.nbytes for n, p in plain.named_parameters() if ".experts." in n)
        model = fcdp_compile.shard(plain, mesh)
        with _LiveBytes(model) as live:
            fcdp_compile.save_pretrained(model, folder / "ours")
        # Besides: a piece that arrives, buffers, messages between ranks.
        pieces = largest / (2 if mesh is None else mesh.size()) + 2000
        limit = whole_bytes + experts + pieces if rank() == 0 else pieces
        assert live.peak < limit, (name, live.peak, whole_bytes, experts, limit)
        assert rank() or live.peak >= whole_bytes


def _loaded_again(mesh: DeviceMesh | None) -> None:
    """A sharded model built without values loads the export."""
    folder, plain = shared_folder(mesh), make(mixtral)
    fcdp_compile.save_pretrained(fcdp_compile.shard(copy.deepcopy(plain), mesh), folder / "ours")
    with torch.device("meta"):
        empty = mixtral()
    model = fcdp_compile.shard(empty, mesh)
    fcdp_compile.load_pretrained(model, folder / "ours")
    fcdp_compile.materialize(model)  # computes buffers that no checkpoint has
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(found), expected), name
    fcdp_compile.save_pretrained(model, folder / "again")
    if rank() == 0:
        compare_tensors(folder / "again", folder / "ours")


ANYWHERE: dict[str, Job] = {
    "a plain module": _plain_module,
    "a tie of one's own": _own_tie,
    "prompts are not merged": _prompts_are_not_merged,
    "embeddings that were tied": _embeddings_that_were_tied,
    "loaded again": _loaded_again,
    "memory": _memory,
    "no folder": no_folder,
    "values that are not there": values_that_are_not_there,
}
"""Jobs that need no particular layout."""

SEVERAL: dict[str, Job] = {
    "compiled and released": _compiled_and_released,
    "disk full": disk_full,
    "other homes": _other_homes,
    "one rank fails": one_rank_fails,
    "others ask for another": others_ask_for_another,
    "own methods": own_methods,
}
MERGED = [name for name in ADAPTED if name not in PROMPTS]
JOBS: dict[str, Job] = {
    **{f"model {n}": partial(_model, name=n, max_shard_bytes=10**9) for n in MODELS},
    **{f"split {n}": partial(_model, name=n, max_shard_bytes=9000) for n in ("llama", "mixtral")},
    **{f"adapter {n}": partial(_adapter, name=n) for n in ADAPTED},
    **{f"merged {n}": partial(_merged, name=n) for n in MERGED},
    **ANYWHERE,
    **SEVERAL,
}
ODD = ("model llama_tied", "split mixtral", "adapter dora", "merged lora")


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_jobs(asked(request, JOBS), nodes=2, ranks_per_node=2)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.slow
def test_on_two_nodes(verdicts: list[dict[str, str]], job: str) -> None:
    assert [v[job] for v in verdicts] == [WORKS] * 4


@pytest.mark.slow
def test_on_three_ranks() -> None:
    """No size is divisible by the number of ranks."""
    jobs = {name: JOBS[name] for name in ODD} | ANYWHERE
    for verdict in run_jobs(jobs, nodes=1, ranks_per_node=3):
        assert verdict == dict.fromkeys(jobs, WORKS)


@pytest.mark.parametrize("job", [*ODD, *ANYWHERE])
def test_in_one_process(job: str) -> None:
    JOBS[job](None)  # type: ignore[arg-type]  # there is no mesh


def test_a_model_that_is_not_sharded(tmp_path: Path) -> None:
    plain = make(llama)
    fcdp_compile.save_pretrained(plain, tmp_path / "ours")
    compare(tmp_path / "ours", saved(plain, tmp_path / "theirs"))


def test_misuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    for size in (0, True, 1.5):
        with pytest.raises(ValueError, match="max_shard_bytes must be a positive whole number"):
            fcdp_compile.save_pretrained(model, tmp_path, max_shard_bytes=size)
    with pytest.raises(FcdpError, match="Linear is not a PEFT model"):
        fcdp_compile.save_pretrained(model, tmp_path / "new", merge=True)
    monkeypatch.setattr(export, "available_bytes", lambda: 23)
    with pytest.raises(FcdpError, match=r"needs 24 bytes of host memory .* and 23 are free"):
        fcdp_compile.save_pretrained(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_no_model_beside_an_adapter(tmp_path: Path) -> None:
    """Else from_pretrained would add the adapter to a model into which it is already merged."""
    model = fcdp_compile.shard(ADAPTED["lora"]())
    fcdp_compile.save_pretrained(model, tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(FcdpError, match="has an adapter"):
        fcdp_compile.save_pretrained(model, tmp_path, merge=True)
    with pytest.raises(FcdpError, match="has an adapter"):
        fcdp_compile.save_pretrained(fcdp_compile.shard(llama()), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    fcdp_compile.save_pretrained(model, tmp_path)
