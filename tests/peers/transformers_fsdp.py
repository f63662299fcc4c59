"""Transformers' own tests of FSDP2 (tests/test_fsdp_mixin.py), with models that fcdp has sharded.

A case is a type of model, a test, and a way.  The tests' functions run as they are, on the ranks that are
there.  They are in our own copy of their module, in which some of the names that they import are set to what
is here.  Transformers' own functions gather whole values and save optimizers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from importlib.metadata import version as version_of
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fcdp_compile
from tests.peers import sources
from tests.peers.outcomes import SkippedError
from tests.peers.serving import LAYOUT
from tests.peers.stubs import stub

_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_TYPES: dict[str, dict[str, Any]] = {
    "cohere2_moe": {"head_dim": 16, "sliding_window": 16, **_EXPERTS},
    "ernie4_5_moe": {"moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2},
    "llama": {},
    "mistral": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 32, **_EXPERTS},
    "gemma2": {"head_dim": 16, "sliding_window": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0},
    "phi3": {},
    "qwen2": {},
}
"""The types that Transformers runs these tests with, and the other decoders of tests/zoo."""

_FILES, _DCP, _WAYS = (
    ("from_pretrained", "load_pretrained"),
    ("DCP", "fcdp's save"),
    ("eager", "compiled"),
)
_TESTS: dict[str, tuple[str, tuple[Any, ...], tuple[str, ...]]] = {
    "save_load": ("fsdp2_save_load", (), _FILES),
    "save_load_dcp": ("fsdp2_save_load_dcp", (), _DCP),
    "hsdp_save_load": ("fsdp2_save_load", (2,), _FILES),
    "hsdp_save_load_dcp": ("fsdp2_save_load_dcp", (2,), _DCP),
    "bf16_training": ("fsdp2_bf16_training", (), ("eager",)),
    "grad_accumulation": ("hsdp_grad_accumulation_vs_single_device", (2,), _WAYS),
    "grad_accumulation_replicas": ("hsdp_grad_accumulation_vs_single_device", (4,), ("eager",)),
    "plan_vs_ddp_untied": ("fsdp2_plan_vs_ddp", (False,), _WAYS),
    "plan_vs_ddp_tied": ("fsdp2_plan_vs_ddp", (True,), _WAYS),
    "sharding_structure": ("fsdp2_sharding_structure", (False,), ("eager",)),
    "expert_parallel_2d_vs_ddp": ("fsdp2_expert_parallel_2d_vs_ddp", (), ("eager",)),
    "expert_parallel_bf16_grads": ("fsdp2_expert_parallel_bf16_grads", (), ("eager",)),
}
"""The function of each test, its arguments after the configuration, and the ways."""

_LEFT_OUT = {
    "sharding_structure": "looks for FSDP2's classes in the model",
    "expert_parallel_bf16": "is about expert parallelism of ranks that have different batches",
}


def version() -> str:
    return f"Transformers {version_of('transformers')}"


def cases() -> list[str]:
    return [
        f"{kind}, {test}, {way}"
        for kind in _TYPES
        for test, (_, _, ways) in _TESTS.items()
        for way in ways
    ]


def run(mesh: DeviceMesh, case: str) -> None:
    """Call a test's function as Transformers' processes do."""
    from transformers import AutoConfig

    kind, test, way = case.split(", ")
    for left_out, why in _LEFT_OUT.items():
        if test.startswith(left_out):
            raise SkippedError(why)
    suite = _suite()
    suite.AutoModelForCausalLM = _AutoModel(way)
    config = AutoConfig.for_model(kind, **_TINY | _TYPES[kind])
    if test.startswith("expert_parallel") and config.base_model_ep_plan is None:
        raise SkippedError("the model has no expert parallel plan")
    name, arguments, _ = _TESTS[test]
    suite._set_determinism(suite.SEED)
    try:
        function = getattr(suite, f"_test_{name}_impl")
        function(dist.get_rank(), type(config), config.to_diff_dict(), *arguments)
    except CheckpointException as error:  # no Exception: it would end the process
        raise RuntimeError("DCP failed") from next(iter(error.failures.values()))[0]
    finally:
        torch.use_deterministic_algorithms(False)


class _AutoModel:
    """AutoModelForCausalLM: what is to be distributed is sharded by fcdp.  way: of the case."""

    def __init__(self, way: str) -> None:
        from transformers import AutoModelForCausalLM

        self._auto, self._way = AutoModelForCausalLM, way
        self.from_config = AutoModelForCausalLM.from_config

    def from_pretrained(
        self, folder: str, *, torch_dtype: Any = None, distributed_config: Any = None
    ) -> nn.Module:
        if distributed_config is None:
            return self._auto.from_pretrained(folder, dtype=torch_dtype)
        replicas, tp = distributed_config.dp_replicate_size, distributed_config.tp_size
        mesh = _mesh(replicas if replicas > 1 else LAYOUT[0], tp)
        strategy = "fcdp" if replicas == 1 else "mics"

        def shard(model: nn.Module) -> None:
            if tp > 1:
                fcdp_compile.tensor_parallel(model, mesh, experts=True)
            fcdp_compile.shard(model, mesh, strategy=strategy)

        # With the tests' seed, a model that loads nothing would have the values that are expected.
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = self._loaded(folder, torch_dtype, shard)
        if self._way == "compiled":
            model.compile(backend="fcdp")
        model._fsdp_size, model._tp_size = distributed_config.fsdp_size, tp
        _as_fsdp2(model, mesh, self._way)
        return model

    def _loaded(self, folder: str, dtype: Any, shard: Callable[[nn.Module], None]) -> Any:
        from transformers import AutoConfig
        from transformers.distributed import checkpoint

        if self._way == "from_pretrained":
            model = self._auto.from_pretrained(folder, dtype=dtype)
            shard(model)
            return model
        more = {} if dtype is None else {"dtype": dtype}
        with torch.device("meta"):
            model = self._auto.from_config(AutoConfig.from_pretrained(folder), **more)
        shard(model)
        if checkpoint.is_sharded_checkpoint(folder):
            fcdp_compile.materialize(model)  # as Transformers' function demands
            checkpoint._load_model_checkpoint_distributed(model, folder)
        elif (Path(folder) / "checkpoint.json").exists():
            fcdp_compile.load(folder, model=model)
        else:
            fcdp_compile.load_pretrained(model, folder)
        fcdp_compile.materialize(model)
        return model


def _as_fsdp2(model: Any, mesh: DeviceMesh, way: str) -> None:
    """Give a sharded model what the tests use of a model that Transformers has sharded."""
    names = {"dp_replicate": "inter", "fsdp": "intra"}
    model._mesh_manager = SimpleNamespace(get_mesh=lambda name: mesh[names[name]])
    if model._tp_size > 1:
        model._device_mesh = _expert_mesh()
    waiting = ExitStack()

    def set_requires_all_reduce(is_required: bool) -> None:
        waiting.close()
        if not is_required:
            waiting.enter_context(fcdp_compile.no_sync(model))

    model.set_requires_all_reduce = set_requires_all_reduce
    if way in _DCP:
        model.save_pretrained = partial(_save_distributed, model, way)


def _save_distributed(
    model: Any, way: str, folder: str, *, is_main_process: bool, distributed_checkpoint: bool
) -> None:
    from transformers.distributed import checkpoint

    assert distributed_checkpoint
    if way == "DCP":
        checkpoint._save_model_checkpoint_distributed(model, folder)
    else:
        fcdp_compile.save(folder, model=model)
    if is_main_process:
        model.config.save_pretrained(folder)


def _first(parameters: Iterator[Any]) -> Any:
    """`next`, for the one place where the tests use it: a parameter's layout in FSDP2's words."""
    parameter = next(parameters)
    placements = dict(zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True))
    return SimpleNamespace(
        device_mesh=SimpleNamespace(mesh_dim_names=("dp_replicate", "fsdp")),
        placements=(placements["inter"], placements["intra"]),
    )


@cache
def _mesh(nodes: int, tp: int) -> Any:
    """Replicas are nodes; ranks that share experts are of one node."""
    return fcdp_compile.make_mesh(nodes=nodes, tp=tp)


@cache
def _expert_mesh() -> DeviceMesh:
    """The ranks of `_mesh(2, 2)` in the same order, by Transformers' names."""
    return init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "fsdp", "tp"))


@cache
def _suite() -> Any:
    package = sources.package("transformers")
    # The source distribution has no such file, and our cases call nothing of either module.
    stub(f"{package}.distributed_testing_utils")
    if "parameterized" not in sys.modules:
        decorators: Any = ModuleType("parameterized")
        decorators.parameterized = SimpleNamespace(expand=lambda table: lambda function: function)
        sys.modules["parameterized"] = decorators
    suite: Any = importlib.import_module(f"{package}.test_fsdp_mixin")
    suite._get_distributed_device_type = lambda: "cpu"
    suite._get_rank_device = lambda rank: torch.device("cpu")
    suite.is_fsdp_managed_module = lambda model: any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )
    suite.next = _first
    return suite
