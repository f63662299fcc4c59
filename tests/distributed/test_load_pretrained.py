"""A checkpoint loaded in parts equals the result of `from_pretrained`, bit for bit, on every rank."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import CheckpointError, FcdpError
from fcdp_compile.models.pretrained.folder import INDEX
from tests.distributed.jobs import WORKS, Job, message_of, run_jobs
from tests.distributed.models import Odd

pytestmark = pytest.mark.distributed

SIZES = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
BERT = BertConfig(
    vocab_size=31, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
)
GPT2 = GPT2Config(vocab_size=67, n_positions=16, n_embd=24, n_layer=2, n_head=2)
MIXTRAL = MixtralConfig(**SIZES, num_local_experts=3)
QWEN = Qwen2MoeConfig(
    **SIZES, moe_intermediate_size=8, shared_expert_intermediate_size=8, num_experts=12
)


def _write(folder: Path) -> None:
    """Write every checkpoint of the tests."""
    torch.manual_seed(1)
    for name, made in {
        "untied": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
        "tied": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "llama-base": LlamaModel(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "gpt2": GPT2LMHeadModel(GPT2),
        "gpt2-base": GPT2Model(GPT2),
        "mixtral": MixtralForCausalLM(MIXTRAL),
        "qwen": Qwen2MoeForCausalLM(QWEN),
        "bert": BertForMaskedLM(BERT),
        "half": LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16),
    }.items():
        made.save_pretrained(folder / name)
    many = Qwen2MoeForCausalLM(QWEN)
    many.save_pretrained(folder / "many", max_shard_size="10KB")
    state = load_file(folder / "tied" / "model.safetensors")
    for name, head in {"both": 0.0, "torn": 1.0}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text((folder / "tied" / "config.json").read_text())
        both = state | {"lm_head.weight": state["model.embed_tokens.weight"] + head}
        save_file(both, folder / name / "model.safetensors", metadata={"format": "pt"})
    (folder / "odd").mkdir()
    save_file(Odd().state_dict(), folder / "odd" / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    _write(path)
    return path


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _check_equal(model: nn.Module, expected: dict[str, Tensor]) -> None:
    # All are gathered before anything is compared: a rank must not leave the others waiting.
    state = {name: _whole(tensor) for name, tensor in model.state_dict().items()}
    assert state.keys() == expected.keys()
    for name, whole in state.items():
        assert whole.dtype == expected[name].dtype, name
        assert torch.equal(whole, expected[name]), name


def _on_meta(kind: type[PreTrainedModel], folder: Path, **options: Any) -> PreTrainedModel:
    # With the dtype that the test asks for, not the checkpoint's.
    config = kind.config_class.from_pretrained(folder, **options)
    with torch.device("meta"):
        return kind(config)


def _as_from_pretrained(
    mesh: DeviceMesh,
    *,
    folder: Path,
    kind: type[PreTrainedModel],
    dtype: torch.dtype = torch.float32,
    on_meta: bool = True,
    strategy: str = "fcdp",
    head: bool = True,
    target: str = "",
) -> None:
    expected = kind.from_pretrained(folder, dtype=dtype).state_dict()
    if on_meta:
        model = _on_meta(kind, folder).to(dtype)
    else:
        model = kind(kind.config_class.from_pretrained(folder)).to(dtype)
    fcdp_compile.shard(model, mesh, strategy=strategy)
    fcdp_compile.load_pretrained(model, folder / target, head=head)
    # Checkpoints lack only the buffers that modules compute.
    waiting = state_of(model).unset.names()
    assert set(waiting).isdisjoint(expected), waiting
    _check_equal(model, expected)


def _plain_module(mesh: DeviceMesh, *, folder: Path) -> None:
    model = fcdp_compile.shard(Odd(), mesh)
    fcdp_compile.load_pretrained(model, folder)
    _check_equal(model, load_file(folder / "model.safetensors"))


def _into_adapted(mesh: DeviceMesh, *, folder: Path, on_meta: bool) -> None:
    base = LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    fresh = _on_meta(LlamaForCausalLM, folder) if on_meta else LlamaForCausalLM(base.config)
    model = peft.get_peft_model(fresh, config)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    fcdp_compile.shard(model, mesh)
    fcdp_compile.load_pretrained(model, folder)
    expected = base.state_dict()
    waiting = set(state_of(model).unset.names())
    for name, whole in {n: _whole(p) for n, p in model.named_parameters()}.items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        plain = plain.replace("original_module.", "").replace("modules_to_save.default.", "")
        is_adapter = "lora_" in name or ("modules_to_save" in name and not on_meta)
        assert (name in waiting) == (is_adapter and on_meta), name
        if not (is_adapter and on_meta):
            value = before[name] if is_adapter else expected[plain]
            assert torch.equal(whole, value), name


def _refusals(mesh: DeviceMesh, *, folder: Path) -> None:
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    fcdp_compile.shard(model, mesh)
    place = mesh.get_local_rank("intra")
    for path, says in [
        (folder / "torn", "'lm_head.weight' and 'model.embed_tokens.weight' are one parameter"),
        (folder / "untied", "'lm_head.weight'"),
        (folder / "mixtral", "unexpected tensors 'model.layers.0"),
        (folder / "gpt2", "missing tensors 'model.embed_tokens.weight'"),
        (folder / ("nowhere" if place else "tied"), "does not exist"),
        (folder / ("half" if mesh.get_rank() else "tied"), "is not the same for all ranks"),
    ]:
        load = partial(fcdp_compile.load_pretrained, model, path)
        told = message_of(CheckpointError, load)
        assert says in told, (path, told)
    _check_equal(model, before)


def _stale_caches(mesh: DeviceMesh, *, folder: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    model.requires_grad_(False)
    fcdp_compile.shard(model, mesh)
    compiled = torch.compile(model, backend="fcdp")
    tokens = torch.arange(8).view(2, 4)
    with torch.no_grad():
        compiled(tokens)
        fcdp_compile.load_pretrained(compiled, folder)
        reference = LlamaForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(compiled(tokens).logits, reference(tokens).logits)


def _from_disk(mesh: DeviceMesh, *, folder: Path, change: str) -> None:
    """Each node reads frozen parameters from disk in the first forward, unless values or files changed."""
    names: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names, group=mesh.get_group("intra"), group_src=0)
    copy = Path(names[0])  # each node has its own copy
    if mesh.get_local_rank("intra") == 0:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
    dist.barrier()
    model = _on_meta(LlamaForCausalLM, folder)
    model.requires_grad_(False)
    fcdp_compile.shard(model, mesh)
    fcdp_compile.load_pretrained(model, copy)
    fcdp_compile.materialize(model)
    reference = LlamaForCausalLM.from_pretrained(folder)
    file = copy / "model.safetensors"
    if change == "file" and mesh.get_rank() == 0:
        raw = file.read_bytes()
        file.write_bytes(raw[:-4000] + bytes(4000))
    elif change == "gone" and mesh.get_rank() == 0:
        file.unlink()
    elif change == "values":
        for p in (*model.parameters(), *reference.parameters()):
            p.data.mul_(2)
    dist.barrier()
    compiled = torch.compile(model, backend="fcdp")
    tokens = torch.arange(8).view(2, 4)
    counters = state_of(model).counters
    before = counters.calls.get("inter_all_gather", 0)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(tokens).logits, reference(tokens).logits)
    gathers = counters.calls.get("inter_all_gather", 0) - before
    assert (gathers > 0) == (bool(change) and mesh.size(0) > 1), gathers
    opened = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
    assert str(file) not in opened
    assert str(file) not in Path("/proc/self/maps").read_text()


def _fails_midway(mesh: DeviceMesh, *, folder: Path) -> None:
    """One rank cannot read on: all ranks raise, and say that the model is half loaded."""
    from fcdp_compile.models.pretrained import source

    model = fcdp_compile.shard(LlamaForCausalLM(LlamaConfig(**SIZES)), mesh)
    copy, calls = source.Files.copy, []

    def failing(self: source.Files, *args: Any) -> None:
        calls.append(args)
        if len(calls) > 3 and mesh.get_rank() == 0:
            raise OSError("input/output error")
        copy(self, *args)

    source.Files.copy = failing  # type: ignore[method-assign]
    try:
        told = message_of(FcdpError, lambda: fcdp_compile.load_pretrained(model, folder))
    finally:
        source.Files.copy = copy  # type: ignore[method-assign]
    assert "half loaded" in told
    assert "input/output error" in told


def _bert_with_a_new_head(mesh: DeviceMesh, *, folder: Path) -> None:
    model = AutoModelForSequenceClassification.from_config(BERT)
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    fcdp_compile.shard(model, mesh)
    told = message_of(CheckpointError, lambda: fcdp_compile.load_pretrained(model, folder))
    assert "'classifier.weight'" in told
    assert "unexpected tensors 'cls." in told
    # The masked model lacks the pooler, which is not a head.
    told = message_of(
        CheckpointError, lambda: fcdp_compile.load_pretrained(model, folder, head=False)
    )
    assert "missing tensors 'bert.pooler.dense." in told
    assert "classifier" not in told
    assert "cls." not in told
    _check_equal(model, expected)


ON_ONE_NODE = ("untied", "both names", "gpt2", "mixtral", "many", "plain module", "adapted on meta")
"""Jobs in which uneven cuts matter."""


def _jobs(folder: Path) -> Iterator[tuple[str, Job]]:
    def case(name: str, job: Callable[..., None], **options: Any) -> tuple[str, Job]:
        return name, partial(job, **options)

    same = _as_from_pretrained
    llama = LlamaForCausalLM
    yield case("untied", same, folder=folder / "untied", kind=llama)
    yield case("untied ddp", same, folder=folder / "untied", kind=llama, strategy="ddp")
    yield case(
        "tied mics", same, folder=folder / "tied", kind=llama, strategy="mics", on_meta=False
    )
    yield case("tied", same, folder=folder / "tied", kind=llama)
    yield case("both names", same, folder=folder / "both", kind=llama)
    yield case("to bf16", same, folder=folder / "untied", kind=llama, dtype=torch.bfloat16)
    yield case("from bf16", same, folder=folder / "half", kind=llama)
    yield case("base to head", same, folder=folder / "llama-base", kind=llama)
    yield case("gpt2", same, folder=folder / "gpt2", kind=GPT2LMHeadModel, on_meta=False)
    yield case("gpt2 base to head", same, folder=folder / "gpt2-base", kind=GPT2LMHeadModel)
    yield case("head to base", same, folder=folder / "untied", kind=LlamaModel, head=False)
    yield case("mixtral", same, folder=folder / "mixtral", kind=MixtralForCausalLM)
    yield case("qwen", same, folder=folder / "qwen", kind=Qwen2MoeForCausalLM, on_meta=False)
    yield case("many", same, folder=folder / "many", kind=Qwen2MoeForCausalLM)
    yield case("index", same, folder=folder / "many", kind=Qwen2MoeForCausalLM, target=INDEX)
    yield case("bert to base", same, folder=folder / "bert", kind=BertForMaskedLM)
    yield case("plain module", _plain_module, folder=folder / "odd")
    yield case("adapted", _into_adapted, folder=folder / "untied", on_meta=False)
    yield case("adapted on meta", _into_adapted, folder=folder / "untied", on_meta=True)
    yield case("refusals", _refusals, folder=folder)
    yield case("stale caches", _stale_caches, folder=folder / "tied")
    for change in ("", "file", "gone", "values"):
        name = f"from disk, changed: {change}"
        yield case(name, _from_disk, folder=folder / "untied", change=change)
    yield case("fails midway", _fails_midway, folder=folder / "untied")
    yield case("new head", _bert_with_a_new_head, folder=folder / "bert")


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node"), [pytest.param(2, 2, marks=pytest.mark.rare), (1, 3)]
)
def test_loaded_as_from_pretrained_loads(folder: Path, nodes: int, ranks_per_node: int) -> None:
    jobs = dict(_jobs(folder))
    if nodes == 1:
        jobs = {name: jobs[name] for name in ON_ONE_NODE}
    for verdicts in run_jobs(jobs, nodes=nodes, ranks_per_node=ranks_per_node):
        assert verdicts == dict.fromkeys(jobs, WORKS)


def test_not_while_parameters_are_whole(folder: Path) -> None:
    model = fcdp_compile.shard(Odd())
    before = [p.detach().clone() for p in model.parameters()]
    with fcdp_compile.gathered(model):
        found = message_of(
            CheckpointError, lambda: fcdp_compile.load_pretrained(model, folder / "odd")
        )
    assert "leave the block of fcdp_compile.gathered" in found
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
