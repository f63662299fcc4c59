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


def _train(
    mesh: DeviceMesh, strategy: str, is_adapted: bool, is_checkpointed: bool, *kinds: str
) -> list[tuple[int, dict[str, int]]]:
    make = partial(_llama, is_adapted=is_adapted, is_checkpointed=is_checkpointed)
    llama = CASES["llama"]
    case = Case(model=make, loss=llama.loss, vocabulary=llama.vocabulary)
    return [_trained(mesh, layers, case, strategy) for layers in kinds]


def test_numbers_are_those_of_replicated_training() -> None:
    for ((plans, _),) in run(_train, "zero3", True, True, "shared", nodes=2, ranks_per_node=1):
        assert plans == LAYERS + 3  # the embedding, the layers, the norm, the head


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("fcdp", marks=pytest.mark.slow),
        *(pytest.param(s, marks=pytest.mark.rare) for s in ("zero3", "zero++", "zero1")),
    ],
)
def test_bytes_are_those_of_one_graph(
    strategy: str, is_adapted: bool, is_checkpointed: bool
) -> None:
    kinds = "shared", "inline"
    for (plans, shared), (whole, inline) in run(
        _train, strategy, is_adapted, is_checkpointed, *kinds, nodes=2, ranks_per_node=1
    ):
        assert (plans, whole) == (LAYERS + 3, 1)
        assert shared == inline
