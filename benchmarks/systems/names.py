"""The systems that the benchmark compares, as data: names, and the bytes that each is expected to send.

The expected bytes serve only to plan how many steps fit into the time (`matrix`); the report shows measured
bytes.  Nothing here imports torch, so that the driver starts quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class ShardedOver(Enum):
    """How widely parameters, gradients and optimizer state are sharded between their uses."""

    GLOBAL = "all ranks"
    INTRA = "a node"
    NONE = "no ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedBytes:
    """Expected bytes sent per node, 2 x 2 ranks on Gloo, in multiples of W (all) and T (trained parameters).

    A node sends step_t * T per optimizer step, and micro_w * W + micro_t * T per micro-batch.
    Source: Gloo sends 0.75 S for a flat all-gather of S, 0.5 S for an all-gather between the nodes, and 1.5 S
    for a flat reduce-scatter or all-reduce; the factors of DeepSpeed were measured with `--quick`.
    """

    micro_w: float = 0.0
    micro_t: float = 0.0
    step_t: float = 0.0

    def step_bytes(self, *, all_bytes: int, trained_bytes: int, accumulation: int) -> float:
        """Return the bytes that a node sends in one optimizer step of `accumulation` micro-batches."""
        micro = self.micro_w * all_bytes + self.micro_t * trained_bytes
        return accumulation * micro + self.step_t * trained_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to train the model.

    name: a value of --only.  title, about: for the report.  family: the module `train_*` that trains it.
    is_ours: fcdp, not a peer.
    accumulating_only: the system differs from another system only when gradients accumulate.
    is_twin: the system sends as much as another system; its cells are left out first if time is short.
    modes: the modes in which it is measured.  in_bf16: it gathers, computes and reduces in bf16, not fp32.
    loss_tolerance: how much its losses may differ from the reference's, relative.
    compile_s: rough time that compilation adds to the first step, on two cores.
    """

    name: str
    title: str
    about: str
    family: str
    state: ShardedOver
    traffic: ExpectedBytes
    is_ours: bool = False
    accumulating_only: bool = False
    is_twin: bool = False
    modes: tuple[str, ...] = ("lora", "full")
    in_bf16: bool = False
    compile_s: float = 0.0
    loss_tolerance: float = 1e-4


_FSDP2 = ExpectedBytes(micro_w=1.5, micro_t=1.5)
_FCDP = System(
    name="fcdp",
    title="fcdp",
    about='`fcdp_compile.shard(strategy="fcdp")` and `torch.compile(backend="fcdp")`, default options; '
    "`no_sync` while accumulating",
    family="train_fcdp",
    state=ShardedOver.GLOBAL,
    traffic=ExpectedBytes(step_t=1.0),
    is_ours=True,
    compile_s=5.0,
)


def _fcdp(name: str, title: str, about: str, **changes: Any) -> System:
    """Fcdp in another way; `changes` are fields in which it differs from "fcdp"."""
    return replace(_FCDP, name=name, title=title, about=about, **changes)


_IN_BF16: dict[str, Any] = {"in_bf16": True, "modes": ("full",), "loss_tolerance": 2e-3}


def _torch_bf16(**fields: Any) -> System:
    return System(family="train_torch", **(_IN_BF16 | fields))


SYSTEMS: tuple[System, ...] = (
    System(
        name="ddp",
        title="DDP",
        about="DistributedDataParallel, `no_sync` while accumulating",
        family="train_torch",
        state=ShardedOver.NONE,
        traffic=ExpectedBytes(step_t=1.5),
    ),
    _FCDP,
    System(
        name="fsdp2",
        title="FSDP2",
        about="`fully_shard` on each block and on the rest, not compiled",
        family="train_torch",
        state=ShardedOver.GLOBAL,
        traffic=_FSDP2,
    ),
    System(
        name="fsdp2-node",
        title="FSDP2, node-sized reshard",
        about="`fully_shard(reshard_after_forward=<ranks per node>)`",
        family="train_torch",
        state=ShardedOver.GLOBAL,
        traffic=ExpectedBytes(micro_w=0.75, micro_t=1.5),
    ),
    System(
        name="hsdp",
        title="HSDP",
        about="`fully_shard` on a 2-D mesh: sharded within a node, replicated between nodes; all-reduce "
        "between nodes only in the last micro-batch",
        family="train_torch",
        state=ShardedOver.INTRA,
        traffic=ExpectedBytes(step_t=1.0),
    ),
    System(
        name="ds-hpz",
        title="DeepSpeed ZeRO-3 + hpZ",
        about="`zero_hpz_partition_size=<ranks per node>`",
        family="train_deepspeed",
        state=ShardedOver.GLOBAL,
        traffic=ExpectedBytes(micro_t=1.5, step_t=0.75),
    ),
    System(
        name="ds-zero3",
        title="DeepSpeed ZeRO-3",
        about="stage 3, gradient clipping off, nothing kept alive between uses",
        family="train_deepspeed",
        state=ShardedOver.GLOBAL,
        traffic=_FSDP2,
    ),
    System(
        name="fsdp2-nosync",
        title="FSDP2, no sync",
        about="`fully_shard` with `set_requires_gradient_sync(False)` while accumulating: whole gradients on "
        "every rank",
        family="train_torch",
        state=ShardedOver.GLOBAL,
        traffic=ExpectedBytes(micro_w=1.5, step_t=1.5),
        accumulating_only=True,
    ),
    System(
        name="ds-hpz-offload",
        title="DeepSpeed hpZ + offload_param",
        about='hpZ with `offload_param: {"device": "cpu"}`',
        family="train_deepspeed",
        state=ShardedOver.GLOBAL,
        traffic=ExpectedBytes(micro_t=1.5, step_t=0.75),
        is_twin=True,
    ),
    _fcdp(
        name="fcdp-zero3",
        title="fcdp as ZeRO-3",
        about='`fcdp_compile.shard(strategy="zero3")`: fcdp without its cache',
        traffic=ExpectedBytes(micro_w=1.0, micro_t=0.5),
        is_twin=True,
    ),
    _fcdp(
        name="fcdp-zero2",
        title="fcdp as ZeRO-2",
        about='`fcdp_compile.shard(strategy="zero2")`: parameters stay whole between their uses; gradients '
        "and optimizer state are sharded over all ranks",
        state=ShardedOver.NONE,
        traffic=ExpectedBytes(micro_t=0.5, step_t=0.5),
    ),
    _fcdp(
        name="fcdp-w8g4",
        title="fcdp, int8 and int4",
        about='`fcdp_compile.shard(strategy="fcdp+w8+g4")`: weights in 8 bits and gradients in 4 between '
        "nodes; its losses may differ by 2 %",
        traffic=ExpectedBytes(step_t=0.2),
        loss_tolerance=2e-2,
    ),
    _fcdp(
        name="fcdp-mics",
        title="fcdp as MiCS",
        about='`fcdp_compile.shard(strategy="mics")`: sharded within a node, replicated between nodes; '
        "`no_sync` while accumulating",
        state=ShardedOver.INTRA,
    ),
    System(
        name="fsdp2-compiled",
        title="FSDP2, compiled",
        about="each block compiled by Inductor, then `fully_shard`",
        family="train_torch",
        state=ShardedOver.GLOBAL,
        traffic=_FSDP2,
        is_twin=True,
        compile_s=60.0,
    ),
    _fcdp(
        name="fcdp-bf16",
        title="fcdp, bf16",
        about="`fcdp_compile.shard(param_dtype=torch.bfloat16)`: gathers, compute and reductions in bf16",
        traffic=ExpectedBytes(step_t=0.5),
        **_IN_BF16,
    ),
    _fcdp(
        name="fcdp-delta",
        title="fcdp, bf16, exact differences",
        about='the same with `strategy="fcdp+delta"`',
        traffic=ExpectedBytes(step_t=0.35),
        **_IN_BF16,
    ),
    _fcdp(
        name="fcdp-delta-g4",
        title="fcdp, bf16, exact differences, 4 bits",
        about='the same with `strategy="fcdp+delta+g4"`; its losses may differ by 2 %',
        traffic=ExpectedBytes(step_t=0.17),
        **(_IN_BF16 | {"loss_tolerance": 2e-2}),
    ),
    _torch_bf16(
        name="fsdp2-bf16",
        title="FSDP2, bf16",
        about="`fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))`",
        state=ShardedOver.GLOBAL,
        traffic=ExpectedBytes(micro_w=0.75, micro_t=0.75),
    ),
    _torch_bf16(
        name="ddp-fp16",
        title="DDP, fp16 gradients",
        about="DistributedDataParallel under `torch.autocast`, with `fp16_compress_hook` (the hook for "
        "bf16 needs NCCL)",
        state=ShardedOver.NONE,
        traffic=ExpectedBytes(step_t=0.75),
    ),
    _torch_bf16(
        name="ddp-powersgd",
        title="DDP, PowerSGD",
        about="DistributedDataParallel under `torch.autocast`, with `powerSGD_hook` of rank 4 from the third "
        "step on; its losses may differ by 5 %",
        state=ShardedOver.NONE,
        traffic=ExpectedBytes(step_t=0.1),
        loss_tolerance=5e-2,
    ),
)

_BROKEN = '`torch.compile(backend="fcdp")` of the model with'

SEAMS: tuple[System, ...] = (
    _fcdp(
        "fcdp-layers",
        "fcdp, layers by themselves",
        '`shard(layers="shared")`: equal layers share a trace',
    ),
    _fcdp("fcdp-break-1", "fcdp, one graph break", f"{_BROKEN} one graph break"),
    _fcdp("fcdp-break-3", "fcdp, three graph breaks", f"{_BROKEN} three graph breaks"),
    _fcdp(
        "fcdp-break-all",
        "fcdp, a graph break after every block",
        f"{_BROKEN} a graph break after every block",
    ),
)
"""Systems of `benchmarks.seams` alone."""

MUON: tuple[System, ...] = (
    _fcdp(
        name="fcdp-muon",
        title="fcdp, Muon",
        about='`fcdp_compile.shard(strategy="fcdp+matrix")`; `fcdp_compile.Muon` steps the matrices of the '
        "blocks, AdamW the rest",
    ),
    System(
        name="fsdp2-muon",
        title="FSDP2, Muon",
        about="`fully_shard`; `torch.optim.Muon` steps the matrices of the blocks, AdamW the rest",
        family="train_torch",
        state=ShardedOver.GLOBAL,
        traffic=ExpectedBytes(micro_w=1.5, micro_t=1.5, step_t=6.0),
    ),
)
"""Systems of `benchmarks.seams --systems` alone that train with Muon."""

OFFLOAD: tuple[System, ...] = (
    _fcdp(
        "fcdp-states-gpu",
        "fcdp, states on the host",
        '`fcdp_compile.offload(AdamW, step_on="gpu")`',
    ),
    _fcdp(
        "fcdp-states-cpu",
        "fcdp, states and step on the host",
        '`fcdp_compile.offload(AdamW, step_on="cpu")`',
    ),
    _fcdp(
        "fcdp-params-host",
        "fcdp, all on the host",
        "`fcdp_compile.shard(offload_params=True)`: home shards, gradients and states in host memory",
    ),
    System(
        name="fsdp2-offload",
        title="FSDP2, CPUOffloadPolicy",
        about="`fully_shard(offload_policy=CPUOffloadPolicy(pin_memory=False))`",
        family="train_torch",
        state=ShardedOver.GLOBAL,
        traffic=_FSDP2,
    ),
    System(
        name="ds-offload",
        title="DeepSpeed ZeRO-Offload",
        about='stage 2 with `offload_optimizer: {"device": "cpu"}`, torch\'s AdamW',
        family="train_deepspeed",
        state=ShardedOver.NONE,
        traffic=ExpectedBytes(micro_t=1.5, step_t=1.5),
    ),
    System(
        name="ds-zero3-offload",
        title="DeepSpeed ZeRO-3, all offloaded",
        about='stage 3 with `offload_optimizer` and `offload_param` on `"cpu"`, torch\'s AdamW',
        family="train_deepspeed",
        state=ShardedOver.GLOBAL,
        traffic=_FSDP2,
    ),
)
"""Systems of `benchmarks.seams --systems` alone that keep optimizer states or parameters on the host."""

BY_NAME = {system.name: system for system in (*SYSTEMS, *SEAMS, *MUON, *OFFLOAD)}

MODEL_MODULES = {
    "lora": "benchmarks.systems.model",
    "full": "benchmarks.systems.model",
    "qlora": "benchmarks.qlora.model",
}
"""The module that makes the model of a mode."""
