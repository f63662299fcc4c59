"""Equal layers are compiled by themselves: the numbers and the bytes are those of one graph."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

from fcdp_compile.core.sharding.shard import state_of
from tests.distributed.beside import Beside
from tests.distributed.models import CASES, Case, checkpointing, with_lora
from tests.distributed.parity import fresh
from tests.distributed.ranks import run
from tests.marks import quick

pytestmark = pytest.mark.distributed

LAYERS = 4


def _llama(*, is_adapted: bool, is_checkpointed: bool) -> nn.Module:
    config = LlamaConfig(
        vocab_size=CASES["llama"].vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    if is_adapted:
        model = with_lora(model, "q_proj", "v_proj")
    return checkpointing(model) if is_checkpointed else model


def _trained(
    mesh: DeviceMesh, layers: str, case: Case, strategy: str
) -> tuple[int, dict[str, int]]:
    """The plans, and the bytes between nodes of the last step."""
    fresh()
    pair = Beside(mesh, case, strategy=strategy, layers=layers, options={"compute": "eager"})
    pair.train(3)
    pair.compare_parameters()
    state = state_of(pair.model)
    moved = {k: n for k, n in state.counters.last_step.items() if n and "inter" in k}
    return len(state.plans), moved


def _train_both(
    mesh: DeviceMesh, strategy: str, is_adapted: bool, is_checkpointed: bool
) -> list[tuple[int, dict[str, int]]]:
    make = partial(_llama, is_adapted=is_adapted, is_checkpointed=is_checkpointed)
    llama = CASES["llama"]
    case = Case(model=make, loss=llama.loss, vocabulary=llama.vocabulary)
    return [_trained(mesh, layers, case, strategy) for layers in ("shared", "inline")]


@pytest.mark.parametrize("is_checkpointed", quick([False, True], True))
@pytest.mark.parametrize("is_adapted", quick([False, True], True))
@pytest.mark.parametrize("strategy", quick(["fcdp", "zero3", "zero++", "zero1"], "zero3"))
def test_numbers_and_bytes_are_those_of_one_graph(
    strategy: str, is_adapted: bool, is_checkpointed: bool
) -> None:
    for apart, whole in run(
        _train_both, strategy, is_adapted, is_checkpointed, nodes=2, ranks_per_node=1
    ):
        assert apart[0] == LAYERS + 3  # the embedding, the layers, the norm, the head
        assert whole[0] == 1
        assert apart[1] == whole[1]
