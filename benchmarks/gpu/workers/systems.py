"""The systems that train one model on one rank of an echo group (`echo`), or alone.

fcdp        node shards in host memory: `device_memory` leaves the cache no room on the GPU
fsdp2       `fully_shard` over all ranks, blocks compiled
megatron    megatron-fsdp's hybrid mode: optimizer over all ranks, parameters within a node
plain       the whole model on the GPU, compiled by blocks; the optimizer steps a rank's share
segments    like plain, but compiled as fcdp's segments: a single process, with nothing to gather
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fcdp_compile
from benchmarks.gpu.workers.echo import init_echo
from benchmarks.gpu.workers.setting import NotRunError, Setting
from benchmarks.systems.model import Gpt, GptBlock, make_model
from benchmarks.systems.shape import QUICK, Shape
from benchmarks.systems.train_fcdp import FcdpTrainer
from benchmarks.systems.train_torch import TorchTrainer, make_adamw, make_compute_trainer
from benchmarks.systems.trainer import RankOfNodes

NODES, RANKS_PER_NODE = 2, 8

_SHAPES = (
    (100e9, Shape(layers=6, width=8192, vocabulary=32000, batch=1, length=2048)),  # 5.4 billion
    (70e9, Shape(layers=4, width=8192, vocabulary=32000, batch=1, length=2048)),  # 3.7 billion
    (38e9, Shape(layers=8, width=4096, vocabulary=32000, batch=1, length=2048)),  # 1.9 billion
    (22e9, Shape(layers=4, width=4096, vocabulary=32000, batch=1, length=2048)),  # 1.1 billion
)
_SMALLEST = Shape(layers=4, width=1024, vocabulary=32000, batch=1, length=1024)
"""A model by the least bytes of a card: the card holds the model with its gradients, which `plain` needs.
Few and wide layers, because the time to compile grows with their number and a part has about a minute."""


def shape_for(setting: Setting) -> Shape:
    """Choose the model's sizes by the memory of the card."""
    if setting.is_quick or not setting.is_cuda:
        return QUICK
    total = torch.cuda.get_device_properties(setting.device).total_memory
    return next((shape for least, shape in _SHAPES if total >= least), _SMALLEST)


def make_trainer(system: str, mode: str, shape: Shape, setting: Setting) -> TorchTrainer:
    """Make the model on the device and wrap it in the named system."""
    if system == "megatron" and importlib.util.find_spec("megatron_fsdp") is None:
        raise NotRunError("megatron-fsdp is not installed")
    if system not in ("plain", "segments"):
        init_echo(NODES, RANKS_PER_NODE, setting.device.type)
    with _defaults(setting):
        model = make_model(shape, mode)
    if system == "fcdp":
        mesh = fcdp_compile.make_mesh(nodes=NODES)
        fcdp_compile.shard(model, mesh, strategy="fcdp")
        # One byte: every bucket stays on the host, however much memory the card has.
        return FcdpTrainer(model, {"device_memory": 1, "compute": setting.compute})
    if system == "segments":
        fcdp_compile.shard(model, None, strategy="fcdp")
        trainer = FcdpTrainer(model, {"compute": setting.compute})
        trainer.optimizer = make_compute_trainer(model, _PLACE).optimizer
        return trainer
    _compile_blocks(model, setting.backend, is_hooked=system == "megatron")
    if system == "plain":
        return make_compute_trainer(model, _PLACE)
    if system == "fsdp2":
        mesh = init_device_mesh(setting.device.type, (NODES * RANKS_PER_NODE,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return TorchTrainer(model, list(model.parameters()))
    assert system == "megatron", system
    if not setting.is_cuda:
        raise NotRunError("megatron-fsdp needs a CUDA device")
    return _megatron(model)


_PLACE = RankOfNodes(rank=0, nodes=NODES, ranks_per_node=RANKS_PER_NODE)


@contextmanager
def _defaults(setting: Setting) -> Iterator[None]:
    """Within the block, make parameters on the device and in the benchmark's dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(setting.dtype)
    try:
        with setting.device:
            yield
    finally:
        torch.set_default_dtype(before)


def _compile_blocks(model: Gpt, backend: str, *, is_hooked: bool) -> None:
    """Compile the blocks, which share one compiled code, and the loss.

    is_hooked: keep the modules' hooks out of the compiled code; Dynamo leaves out FSDP2's hooks by itself.
    """
    for block in model.blocks:
        if is_hooked:
            block.forward = torch.compile(block.forward, backend=backend)
        else:
            block.compile(backend=backend)
    whole: Any = model
    whole.loss_of = torch.compile(model.loss_of, backend=backend)


def _megatron(model: Gpt) -> TorchTrainer:
    """Wrap the model as megatron-fsdp 0.6.1 needs it; imported here, as few machines have it."""
    megatron: Any = importlib.import_module("megatron_fsdp")
    names = ("dp_outer", "dp_shard")
    mesh = init_device_mesh("cuda", (NODES, RANKS_PER_NODE), mesh_dim_names=names)
    precision: Any = importlib.import_module("megatron_fsdp.mixed_precision")
    sharded = megatron.fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim="dp_shard",
        dp_outer_dim="dp_outer",
        hybrid_fsdp_group=dist.group.WORLD,
        fsdp_unit_modules=[GptBlock],
        zero_dp_strategy="optim_grads_params",
        outer_dp_sharding_strategy="optim",
        # None: the model's dtype, as in the other systems.
        mixed_precision_policy=precision.MixedPrecisionPolicy(main_params_dtype=None),
    )
    trainer = TorchTrainer(sharded, list(sharded.parameters()))
    trainer.optimizer = megatron.fully_shard_optimizer(make_adamw(list(sharded.parameters())))
    return trainer
