"""Models to export, exports by their own `save_pretrained`, and comparisons of folders."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.device.choice import seeded
from tests.distributed.beside import whole

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2}


def shared_folder(mesh: DeviceMesh | None) -> Path:
    """Make a folder; returns its path on all ranks."""
    told = [tempfile.mkdtemp(prefix="fcdp-") if rank() == 0 else ""]
    if mesh is not None:
        dist.broadcast_object_list(told, 0)
    return Path(told[0])


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**GROUPED))


def llama_tied() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=True))


def llama_bf16() -> PreTrainedModel:
    return llama().to(torch.bfloat16)


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_positions=64, n_embd=24, n_layer=2, n_head=4)
    )


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**GROUPED, num_local_experts=4))


def qwen_moe() -> PreTrainedModel:
    experts = {"num_experts": 4, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**GROUPED, **experts))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=97, d_model=24, d_kv=6, d_ff=50, num_layers=2, num_heads=4)
    )


def bert() -> PreTrainedModel:
    return BertForMaskedLM(BertConfig(**SIZES))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    m.__name__: m for m in (llama, llama_tied, llama_bf16, gpt2, mixtral, qwen_moe, t5, bert)
}


def _lora(**more: Any) -> peft.LoraConfig:
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**options | more)


def _two(model: nn.Module) -> Any:
    adapted = peft.get_peft_model(model, _lora())
    adapted.add_adapter("other", _lora(r=2, target_modules=["down_proj"]))
    return adapted


ADAPTED: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.get_peft_model(llama(), _lora()),
    "dora": lambda: peft.get_peft_model(
        llama(), _lora(use_dora=True, use_rslora=True, modules_to_save=["lm_head"])
    ),
    "embedding": lambda: peft.get_peft_model(
        llama_tied(), _lora(target_modules=["embed_tokens", "q_proj"])
    ),
    "tokens": lambda: peft.get_peft_model(llama(), _lora(trainable_token_indices=[1, 5])),
    "conv1d": lambda: peft.get_peft_model(
        gpt2(), _lora(target_modules=["c_attn"], bias="lora_only", fan_in_fan_out=True)
    ),
    "two": lambda: _two(llama()),
    "ia3": lambda: peft.get_peft_model(
        llama(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    ),
    "prompt": lambda: peft.get_peft_model(
        llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ),
    "prefix": lambda: peft.get_peft_model(
        llama(),
        peft.PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True
        ),
    ),
}
"""Adapted models, named by what is special about the adapters."""

PROMPTS = ("prompt", "prefix")


def make(model: Callable[[], Any]) -> Any:
    """Build the model with random values: equal biases or norms would hide a mistaken name."""
    torch.manual_seed(0)
    made = model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    return made.eval()


def ids() -> Tensor:
    return torch.randint(0, 97, (2, 7), generator=seeded(1))


def train(model: Any, plain: Any) -> None:
    """Train two steps, with an equal batch on every rank; then copy the trained values to the plain model."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(2):
        model(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    values = dict(plain.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values[name.removeprefix("_orig_mod.")].copy_(whole(parameter))


def same_logits(model: Any, expected: Any) -> None:
    """Two models with equal files must compute equal logits, except for rounding.

    Loaded weights have other addresses, and on some CPUs the choice of kernels depends on addresses.
    """
    with torch.no_grad():
        found, wanted = (m.eval()(input_ids=ids()).logits for m in (model, expected))
    torch.testing.assert_close(found, wanted)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the files in a folder and below, by file and name."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}, path
            for name in file.keys():  # noqa: SIM118  # not a dictionary
                found[f"{path.relative_to(folder)}: {name}"] = file.get_tensor(name)
    return found


def compare(folder: Path, expected: Path) -> None:
    """Both folders must hold the same files, texts and tensors, bit by bit."""
    files, others = (
        sorted(str(p.relative_to(f)) for p in f.rglob("*") if p.is_file())
        for f in (folder, expected)
    )
    assert files == others
    found, wanted = tensors_of(folder), tensors_of(expected)
    assert sorted(found) == sorted(wanted)
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name
    for name in files:
        if not name.endswith(".safetensors"):
            assert _text(folder / name) == _text(expected / name), name


def _text(path: Path) -> str:
    """A file's text; PEFT writes sets as lists, in an order that depends on Python's hash seed."""
    text = path.read_text()
    if path.name != "adapter_config.json":
        return text
    found = {k: sorted(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
    return json.dumps(found)


def same_bytes(folder: Path, expected: Path) -> None:
    """Both folders must hold the same files, byte for byte."""
    found, wanted = (
        {str(p.relative_to(f)): p.read_bytes() for p in f.rglob("*") if p.is_file()}
        for f in (folder, expected)
    )
    assert sorted(found) == sorted(wanted)
    assert [n for n, data in found.items() if data != wanted[n]] == []


def compare_tensors(folder: Path, expected: Path) -> None:
    """Both folders must hold the same tensors, whichever files they are in."""
    found, wanted = (
        {name.partition(": ")[2]: t for name, t in tensors_of(f).items()}
        for f in (folder, expected)
    )
    assert sorted(found) == sorted(wanted)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def saved(plain: Any, folder: Path, **options: Any) -> Path:
    """Save with the library's own `save_pretrained`."""
    copy.deepcopy(plain).save_pretrained(folder, **options)
    return folder
