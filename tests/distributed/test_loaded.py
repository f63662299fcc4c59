"""Models that Transformers or Accelerate has spread over devices or ranks are refused, and say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import fcdp_compile
from tests.distributed.ranks import run

_CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip


def _load(folder: Path, **arguments: Any) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    return model


def _spread_over_ranks(mesh: DeviceMesh, folder: Path) -> None:
    if dist.get_rank() == 0:
        LlamaForCausalLM(_CONFIG).save_pretrained(folder)
    dist.barrier()
    ways: list[tuple[str, dict[str, Any]]] = [
        ("tp=2", {"tp_plan": "auto"}),
        ("tp=2", {"distributed_config": DistributedConfig(tp_size=2)}),
        ("fsdp=2", {"distributed_config": DistributedConfig(fsdp_size=2)}),
    ]
    for spread, arguments in ways:
        told = rf"^the model was loaded with tp_plan or distributed_config.*\({spread}\); load it without"
        with pytest.raises(ValueError, match=told):
            fcdp_compile.shard(_load(folder, **arguments), mesh)
    fcdp_compile.shard(_load(folder, distributed_config=DistributedConfig(tp_size=1)), mesh)


@pytest.mark.distributed
def test_tensor_parallelism_and_fsdp_of_transformers(tmp_path: Path) -> None:
    run(_spread_over_ranks, tmp_path, nodes=2, ranks_per_node=1)


def test_a_device_map_with_offload(tmp_path: Path) -> None:
    LlamaForCausalLM(_CONFIG).save_pretrained(tmp_path)
    spread = {"model": "cpu", "lm_head": "disk"}
    model = _load(tmp_path, device_map=spread, offload_folder=tmp_path / "offload")
    assert model.get_parameter("lm_head.weight").is_meta, "nothing is offloaded"
    with pytest.raises(ValueError, match=r"^the model was loaded with a device_map over cpu, disk"):
        fcdp_compile.shard(model)
    model = _load(tmp_path, device_map={"": "cpu"})
    fcdp_compile.shard(model)


@pytest.mark.parametrize(
    ("device_map", "is_refused"),
    [
        ({"0": 0, "1": "cuda:1"}, True),
        ({"0": "cpu", "1": 0}, True),
        ({"": "disk"}, True),
        ({"0": 0, "1": "cuda", "2": torch.device("cuda", 0)}, False),
        ({"": "cpu"}, False),
    ],
)
def test_device_maps(device_map: dict[str, Any], is_refused: bool) -> None:
    inner = nn.Linear(2, 2)
    vars(inner)["hf_device_map"] = device_map
    model = nn.Sequential(inner)
    if not is_refused:
        fcdp_compile.shard(model)
        return
    with pytest.raises(ValueError, match=r"^0 was loaded with a device_map over .*one device"):
        fcdp_compile.shard(model)


def test_hooks_that_offload() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    cpu_offload(model, torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"is offloaded by Accelerate.*remove_hook_from_submodules"
    ):
        fcdp_compile.shard(model)


def test_the_variable_of_accelerate_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(
        ValueError, match=r"ACCELERATE_USE_FSDP is set.*no FSDP in accelerate config"
    ):
        fcdp_compile.shard(nn.Linear(2, 2))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    fcdp_compile.shard(nn.Linear(2, 2))
