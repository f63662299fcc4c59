"""Quantised models of Transformers and PEFT in one process: read from a checkpoint, merged, and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fcdp_compile

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")


def _gpt2(folder: Path, skipped: list[str] | None = None) -> Any:
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.BitsAndBytesConfig(
            **options, llm_int8_skip_modules=skipped
        ),
        device_map="cpu",
        dtype=torch.float32,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=1, n_head=4, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("skipped", [None, ["c_attn", "mlp", "lm_head"]], ids=["all", "square"])
def test_weights_that_a_checkpoint_has_transposed_are_quantised_in_the_layers_order(
    checkpoint: Path, skipped: list[str] | None
) -> None:
    from transformers.quantizers import AutoHfQuantizer

    library = _gpt2(checkpoint, skipped)
    quantizer = AutoHfQuantizer.from_config(library.config.quantization_config, pre_quantized=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(checkpoint), dtype=torch.float32
        )
        quantizer.preprocess_model(model, dtype=torch.float32, device_map={"": "cpu"})
    fcdp_compile.shard(model.requires_grad_(False).eval())
    fcdp_compile.load_pretrained(model, checkpoint)
    fcdp_compile.materialize(model)
    x = torch.arange(12)[None]
    assert torch.equal(model(x).logits, library.eval()(x).logits)


def _scale(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scale_layer(0.5)


ADAPTERS = {
    **{
        what: peft.LoraConfig(target_modules=["c_attn", "c_proj"], task_type="CAUSAL_LM")
        for what in ("as it is", "scaled", "merged before")
    },
    "olora": peft.LoraConfig(target_modules=["c_attn"], init_lora_weights="olora"),
    "ia3": peft.IA3Config(target_modules=["c_attn", "c_proj"], feedforward_modules=["c_proj"]),
    "adalora": peft.AdaLoraConfig(target_modules=["c_attn"], total_step=9),
}


@pytest.mark.parametrize("what", ADAPTERS)
def test_a_merged_model_computes_what_the_adapted_one_did(
    what: str, checkpoint: Path, tmp_path: Path
) -> None:
    """Also where adapters have changed the base, or a program has changed what files do not hold."""
    torch.manual_seed(0)
    model = peft.get_peft_model(_gpt2(checkpoint), ADAPTERS[what])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1)
    if what == "scaled":
        _scale(model)
    if what == "merged before":
        model.merge_adapter()
    x = torch.arange(12)[None]
    expected: Tensor = model.train()(x).logits  # in an evaluation some kernels compute in bf16
    fcdp_compile.shard(model)
    random = torch.get_rng_state()
    fcdp_compile.save_pretrained(model, tmp_path / "merged", merge=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(
        t.dtype == torch.float32 for t in load_file(tmp_path / "merged/model.safetensors").values()
    )
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(made(x).logits, expected, rtol=1e-4, atol=1e-5)
