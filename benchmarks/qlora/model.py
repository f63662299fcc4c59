"""A Llama with a base in NF4 (double quantisation) and LoRA on its linear layers, for every system alike."""

from __future__ import annotations

import bitsandbytes
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from benchmarks.systems.shape import Shape

ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class TrainedLlama(nn.Module):
    """A Llama whose forward returns the loss; ids have shape [batch, length]."""

    def __init__(self, adapted: nn.Module, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.adapted = adapted
        self._blocks = [blocks]  # in a list, lest the module registers its blocks twice

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers, each of which systems may shard by itself."""
        return self._blocks[0]

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.adapted(input_ids=ids, labels=ids).loss
        return loss


def make_model(shape: Shape, mode: str) -> TrainedLlama:
    """Make the model; its weights depend on nothing but the shape.  There is one mode, "qlora"."""
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=2 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        use_cache=False,
    )
    adapted = quantise_and_adapt(config)
    return TrainedLlama(adapted, adapted.get_base_model().model.layers)


def quantise_and_adapt(config: transformers.PretrainedConfig) -> nn.Module:
    """Make the model of a configuration with a quantised base and adapters, the same on every rank."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path != "lm_head":
            model.set_submodule(path, quantised(module))
    model.requires_grad_(False)
    adapted: nn.Module = get_peft_model(model, adapters())
    return adapted


def adapters() -> LoraConfig:
    """LoRA of rank 8 on the linear layers."""
    return LoraConfig(r=8, target_modules=ADAPTED, task_type="CAUSAL_LM")


def quantised(plain: nn.Linear) -> nn.Module:
    """The layer in NF4 with double quantisation."""
    layer = bitsandbytes.nn.Linear4bit(
        plain.in_features,
        plain.out_features,
        bias=plain.bias is not None,
        compute_dtype=torch.float32,
        quant_type="nf4",
    )
    layer.load_state_dict(plain.state_dict())
    made: nn.Module = layer.to("cpu")
    return made
