"""How an integration shards and compiles the model that it is given; the same options in each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.backend.options import Options
from fcdp_compile.core.params.mesh import process_count
from fcdp_compile.core.ranks.inner_mesh import cp_of, tp_of
from fcdp_compile.errors import ArgumentError
from fcdp_compile.strategy import Strategy

BACKEND = "fcdp"
"""The backend's name for `torch.compile`."""

_OF_SHARD = (
    "strategy",
    "param_dtype",
    "reduce_dtype",
    "gradient_on",
    "module_strategies",
    "layers",
)
"""The options that are arguments of `fcdp_compile.shard`."""


@dataclass(frozen=True, kw_only=True)
class FcdpOptions:
    """How an integration shards and compiles the models that it is given.

    strategy, param_dtype, reduce_dtype, gradient_on, module_strategies, layers: as `fcdp_compile.shard` takes
    them.
    nodes, cp, tp: as `fcdp_compile.make_mesh` does; by default torchrun's nodes.  With cp > 1, models get
    `fcdp_compile.context_parallel`, with tp > 1, `fcdp_compile.tensor_parallel`.
    dynamic: as `torch.compile` takes it.
    options: the backend's options, `torch.compile(…, backend="fcdp", options=…)`.
    companion_strategy: of models that are only evaluated, such as a reference, a teacher or a reward model;
    by default `strategy`.
    peak_tflops: the peak of one GPU in the dtype of compute, 1e12 operations a second; with it the Trainer
    logs its model FLOPs utilisation.
    generate: whether parameters are whole on every rank while a model generates: "whole"; "sharded", for
    models that do not fit a GPU; "auto": whole if they fit the free memory.
    survive: after how many steps the Trainer keeps its state in the memory of the nodes, such as 1; a job
    that loses a process or a node goes on from there (`fcdp_compile.survive`).  None: never.

    Raises: ValueError or TypeError for a strategy or an option that does not exist.
    """

    strategy: str | Strategy = "fcdp"
    nodes: int | None = None
    cp: int = 1
    tp: int = 1
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    gradient_on: str | None = None
    module_strategies: Mapping[str, str | Strategy] | None = None
    layers: Literal["auto", "inline", "shared"] = "auto"
    dynamic: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    companion_strategy: str | Strategy | None = None
    generate: Literal["auto", "whole", "sharded"] = "auto"
    survive: int | None = None
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        Strategy.parse(self.strategy)
        Options.parse(self.options)
        if self.companion_strategy is not None:
            Strategy.parse(self.companion_strategy)
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise ArgumentError(f"peak_tflops must be more than 0, not {self.peak_tflops!r}")
        if self.survive is not None and not (type(self.survive) is int and self.survive > 0):
            raise ArgumentError(
                f"survive must be a whole number of steps above 0, not {self.survive!r}"
            )
        if self.generate not in ("auto", "whole", "sharded"):
            raise ArgumentError(
                f"generate must be 'auto', 'whole' or 'sharded', not {self.generate!r}"
            )

    def with_parallelism(self, config: Any) -> FcdpOptions:
        """These options with the sizes of a `ParallelismConfig` of Accelerate, or without if it is None.

        cp_size and sp_size mean `cp`, tp_size means `tp`; dp_shard_size may be ranks / (cp * tp).

        Raises: ArgumentError for other sizes and for a `cp` or `tp` that contradicts them.
        """
        if config is None:
            return self
        # Accelerate lets one of them be more than 1.
        of_cp = "cp_size" if config.cp_size > 1 else "sp_size"
        sizes = {}
        for mine, theirs in (("cp", of_cp), ("tp", "tp_size")):
            size, own = getattr(config, theirs), getattr(self, mine)
            if size > 1 < own != size:
                raise ArgumentError(
                    f"parallelism_config has {theirs}={size}, but FcdpOptions has {mine}={own}; give one of "
                    "them"
                )
            sizes[mine] = max(size, own)
        merged = replace(self, **sizes)
        apart = max(1, process_count() // merged.sharers)
        for name, size, why in (
            ("dp_replicate_size", 1, "FcdpOptions(strategy=…) says how far models are sharded"),
            ("dp_shard_size", apart, f"ranks / (cp * tp) is {apart}"),
        ):
            if (given := getattr(config, name)) not in (1, size):
                raise ArgumentError(
                    f"parallelism_config has {name}={given}, but {why}; set it to {size}, or leave it out"
                )
        return merged

    @property
    def sharers(self) -> int:
        """How many ranks get the same batches."""
        return self.cp * self.tp

    def of_companions(self) -> FcdpOptions:
        """The options of models that are only evaluated."""
        strategy = self.strategy if self.companion_strategy is None else self.companion_strategy
        return replace(self, strategy=strategy, module_strategies=None)

    def shard_arguments(self) -> dict[str, Any]:
        """The arguments of `fcdp_compile.shard` after the mesh."""
        return {name: getattr(self, name) for name in _OF_SHARD}

    def compile_arguments(self) -> dict[str, Any]:
        """The arguments of `torch.compile`, but the model."""
        options = dict(self.options) or None
        return {"backend": BACKEND, "dynamic": self.dynamic, "options": options}

    def sharding(self) -> dict[str, Any]:
        """The options that come too late for a sharded model, by name."""
        return {"nodes": self.nodes, "cp": self.cp, "tp": self.tp, **self.shard_arguments()}

    def check_sharded_before(self, mesh: DeviceMesh | None) -> None:
        """Refuse options that come too late for a model that its owner has sharded over a mesh.

        Raises: ValueError.
        """
        defaults = {f.name: f.default for f in fields(self)}
        of_mesh = {"cp": cp_of(mesh), "tp": tp_of(mesh)}
        for name, value in self.sharding().items():
            if value not in (defaults[name], of_mesh.get(name)):
                raise ArgumentError(
                    f"FcdpOptions({name}={value!r}) comes too late: the model is sharded already; give it to "
                    "fcdp_compile.shard or make_mesh, or hand over an unsharded model"
                )


def refuse_shared(mesh: DeviceMesh | None, dims: Iterable[str], who: str) -> None:
    """Refuse a model on a mesh with dimensions that a library's data loaders do not know.

    dims: names of these dimensions.  who: the library.

    Raises: ArgumentError.
    """
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if found := [name for name in dims if name in names]:
        raise ArgumentError(
            f"the model was sharded over a mesh with {found[0]!r}, but {who} would give the ranks of such a "
            "group different batches; train it in a loop of your own"
        )
