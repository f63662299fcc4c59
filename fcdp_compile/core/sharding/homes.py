"""Where home shards are: on home nodes (`core.params.layout` [Note: home nodes]), and in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.core.params.inner_cut import is_declared
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.spec import may_leave
from fcdp_compile.core.ranks.inner_mesh import CONTEXT, CUT, Cut, cp_of
from fcdp_compile.errors import ArgumentError
from fcdp_compile.strategy.home_nodes import home_nodes

_FULL = 0.75
"""The part of a GPU from which on "auto" offloads; gathered buckets and activations need the rest."""


def matrices_of(root: nn.Module, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The trainable matrices among these parameters, without embeddings.

    An embedding is used row by row, so no optimizer orthogonalises it, and often it is larger than the rest.
    """
    # Not `m.weight`, which in a sharded model gathers.
    embeddings = {
        m._parameters.get("weight") for m in root.modules() if isinstance(m, nn.Embedding)
    }
    return [p for p in parameters if p.ndim == 2 and p.requires_grad and p not in embeddings]


def home_nodes_of(matrices: Sequence[nn.Parameter], nodes: int) -> dict[nn.Parameter, int]:
    """The home node of each matrix; the same on all ranks, which have the same model."""
    sizes = [(tuple(p.shape), p.element_size()) for p in matrices]
    return dict(zip(matrices, home_nodes(sizes, nodes), strict=True))


def check_inner_dims(root: nn.Module, mesh: DeviceMesh | None) -> None:
    """Refuse a model that does not fit a mesh whose ranks share sequences or parameters.

    The model must know that ranks share sequences.  Parameters that were added after `tensor_parallel`, such
    as adapters, are cut by nobody: each rank would train other values of what all take for one.

    Raises: ArgumentError.
    """
    if cp_of(mesh) > 1 and not any(CONTEXT in vars(module) for module in root.modules()):
        raise ArgumentError(
            f"mesh has cp={cp_of(mesh)}, but the attention of {type(root).__name__} sees one rank's part of "
            "the sequences; call fcdp_compile.context_parallel first, or make the mesh without cp"
        )
    modules = root.modules() if isinstance(root, nn.Module) else ()  # check_model will raise
    for module in modules:
        if (cut := vars(module).get(CUT)) is not None:
            _check_cut(module, cut)


def _check_cut(module: nn.Module, cut: Cut) -> None:
    """Raises: ArgumentError for a model that is no longer what `tensor_parallel` has made."""
    if cut.model != id(module):
        raise ArgumentError(
            f"{type(module).__name__} was copied after fcdp_compile.tensor_parallel, and computes with the "
            "parameters of the model that it was copied from; copy first, then call tensor_parallel for each"
        )
    named = dict(module.named_parameters())
    if (name := next((n for n in named if n not in cut.names), None)) is not None:
        raise ArgumentError(
            f"{type(module).__name__} got parameter {name!r} after fcdp_compile.tensor_parallel; call "
            "tensor_parallel again, which cuts the adapters"
        )
    lost = (n for n, p in named.items() if n in cut.declared and not is_declared(p))
    if (name := next(lost, None)) is not None:
        raise ArgumentError(
            f"parameter {name!r} was replaced after fcdp_compile.tensor_parallel (to_empty, "
            "load_state_dict(assign=True)), so its gradient would not be summed; give the parameters values "
            "in place, or use load_pretrained or materialize after shard"
        )


def check_offload(offload_params: object) -> None:
    """Refuse unknown values of the argument.

    Raises: ArgumentError.
    """
    if not isinstance(offload_params, bool) and offload_params != "auto":
        raise ArgumentError(f"offload_params must be True, False or 'auto', not {offload_params!r}")


def fills(gpu_bytes: int | None, specs: Iterable[tuple[ParamSpec, bool]]) -> bool:
    """Whether home shards, gradients and Adam's moments take too much of a GPU; the same on all ranks.

    gpu_bytes: of the smallest GPU; None without GPUs, where nothing is too much.  specs: each with whether
    the parameter is trainable.
    """
    taken = sum(
        spec.taken_bytes(is_frozen=not is_trained)
        for spec, is_trained in specs
        if not may_leave(spec, is_frozen=not is_trained)
    )
    return gpu_bytes is not None and taken > _FULL * gpu_bytes
