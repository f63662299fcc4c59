"""Cut a Transformers model over the ranks of a node: tensor and expert parallelism.

Transformers does the cutting, by the plan that each of its models has; fcdp then shards each rank's part.

Linear layers that ranks share compute with plain tensors: Transformers' own forwards compute with DTensors,
and torch 2.13 cannot trace a linear layer of DTensors if its input's sizes vary (the sizes of a view in the
backward are defined by themselves), and sequences vary.  Source: Megatron-LM (Shoeybi et al., 2019), section
3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import linear

from fcdp_compile.core.params.inner_cut import InnerCut, InnerTensor, declare_part, is_declared
from fcdp_compile.core.ranks.inner_mesh import CUT, TP, Cut, tp_mesh_of
from fcdp_compile.errors import ArgumentError
from fcdp_compile.extras import require
from fcdp_compile.models.parallel.context import transformers_base
from fcdp_compile.models.quantised.weight import FORMATS

M = TypeVar("M", bound=nn.Module)

_SUMMED = "replicated_with_grad_allreduce"
"""Transformers' style for norms of heads.  Its own hook would sum accumulated gradients again."""


def tensor_parallel(model: M, mesh: DeviceMesh | None, *, experts: bool = False) -> M:
    """Cut the parameters of a Transformers model over the "tp" ranks of a mesh; returns the model.

    Call it before `shard`, and after PEFT, or again after PEFT: then it cuts the adapters.  The ranks of a
    "tp" group must then get the same batches.  The parts are those of the model's own plan (`model.tp_plan`).
    Without "tp" in the mesh nothing happens.

    mesh: from `make_mesh(tp=…)`.  experts: give each rank whole experts of a mixture (`model.ep_plan`),
    instead of a part of every expert.

    Raises: ArgumentError for models that have no plan, or whose heads or experts the ranks cannot share.
    """
    if mesh is None or tp_mesh_of(mesh) is None:
        return model
    tp = mesh[TP]
    tensors = require("transformers.distributed.tensor_parallel", "tensor_parallel")
    otherwise = '; cut other models with torch\'s parallelize_module on mesh["tp"]'
    base = transformers_base(model, "tensor_parallel", otherwise)
    cut: Cut | None = vars(base).get(CUT)
    if (problem := _problem(base, cut, tp.size(), experts=experts)) is not None:
        raise ArgumentError(f"tensor_parallel cannot cut {type(base).__name__}: {problem}")
    expert_rules = dict(_applied(base, base.ep_plan)) if experts else {}
    rules = {n: s for n, s in _applied(base, base.tp_plan) if n not in expert_rules}
    if cut is not None:
        _adopt_parts(base, tp)
        expert_rules, rules = {}, _left(base, rules)
    for name in [n for n, style in rules.items() if style == _SUMMED]:
        del rules[name]
        if name in (modules := dict(base.named_modules())):
            for parameter in modules[name].parameters(recurse=False):
                declare_part(parameter, mesh, Replicate(), sum_gradients=True)
    tensors.apply_tensor_parallelism(base, tp, rules)
    if expert_rules:
        more = require("transformers.distributed.expert_parallel", "tensor_parallel")
        more.apply_expert_parallelism(base, tp, tp, expert_rules, ep_implementation="all_reduce")
    _compute_with_parts(base, rules, tp)
    base.tie_weights()
    named = dict(base.named_parameters())
    declared = frozenset(name for name, p in named.items() if is_declared(p))
    ids = frozenset(map(id, named.values()))
    vars(base)[CUT] = Cut(model=id(base), names=frozenset(named), ids=ids, declared=declared)
    return model


def is_cut(model: nn.Module) -> bool:
    """Whether ranks share a parameter of a model that is not sharded yet."""
    return any(isinstance(p, DTensor) or is_declared(p) for p in model.parameters())


def _adopt_parts(base: nn.Module, mesh: DeviceMesh) -> None:
    """Make DTensors of adapters that PEFT has made for this rank's part of a layer, not for the layer."""
    for module in base.modules():
        whole = getattr(getattr(module, "base_layer", None), "weight", None)
        if not isinstance(whole, DTensor):
            continue
        (placement,) = whole.placements
        dim = placement.dim if isinstance(placement, Shard) else 0
        adapters = getattr(module, "lora_A" if dim else "lora_B", None)
        layers = adapters.values() if isinstance(adapters, nn.ModuleDict) else ()
        for layer, (name, part) in ((a, p) for a in layers for p in list(a.named_parameters())):
            if isinstance(part, DTensor) or dim >= part.ndim or part.shape[dim] == whole.shape[dim]:
                continue
            cut = InnerCut(
                shape=(*part.shape[:dim], whole.shape[dim], *part.shape[dim + 1 :]),
                placement=Shard(dim),
                index=mesh.get_local_rank(),
                ranks=mesh.size(),
                mesh=mesh,
            )
            made = InnerTensor(cut).of(part.detach())
            setattr(layer, name, nn.Parameter(made, requires_grad=part.requires_grad))


def _left(base: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """The rules for what a model got after it was cut."""
    parameters, modules = dict(base.named_parameters()), dict(base.named_modules())

    def is_new(name: str) -> bool:
        if (parameter := parameters.get(name)) is None:
            return "forward" not in vars(modules[name])
        return not (isinstance(parameter, DTensor) or is_declared(parameter))

    return {name: style for name, style in rules.items() if is_new(name)}


def _problem(base: Any, cut: Cut | None, ranks: int, *, experts: bool) -> str | None:
    """Why these ranks cannot share the model; None if they can."""
    config = base.config.get_text_config()
    if not base.tp_plan:
        return 'it has no tp_plan; cut it with torch\'s parallelize_module on mesh["tp"]'
    if cut is not None:
        copied = (
            n for n, p in base.named_parameters() if isinstance(p, DTensor) and id(p) not in cut.ids
        )
        if (name := next(copied, None)) is not None:
            return f"{name!r} was copied after the model was cut (modules_to_save); use PEFT before"
    elif is_cut(base):
        return "it is cut already"
    if any(format_of(p) is not None for p in base.parameters() for format_of in FORMATS):
        return "its weights are quantised, and nothing computes with parts of them; use context_parallel"
    if experts and not base.ep_plan:
        return "it has no experts (ep_plan); leave out experts=True"
    heads = getattr(config, "num_attention_heads", ranks)
    pairs = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or pairs % ranks:
        return (
            f"{ranks} ranks cannot share {heads} query heads and {pairs} key heads; use a tp=… that divides "
            "both"
        )
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts and (count is None or count % ranks):
        return f"{ranks} ranks cannot share {count} experts; use a tp=… that divides them"
    return None


def _applied(base: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names of modules and parameters with the style that a plan gives them.

    A layer with adapters passes its style on to the base layer, and to the adapter's matrix on the side that
    is cut.
    """

    def style_of(name: str) -> str | None:
        return plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))

    parameters = {name for name, _ in base.named_parameters()}  # of tied ones, the first
    for name, module in base.named_modules():
        if (style := style_of(name)) is None:
            for own, _ in module.named_parameters(recurse=False):
                if (found := style_of(f"{name}.{own}" if name else own)) is not None:
                    yield f"{name}.{own}", found
            continue
        for at in _computing(name, module, style):
            for own in base.get_submodule(at)._parameters:
                if f"{at}.{own}" in parameters:
                    yield f"{at}.{own}", style_of(f"{name}.{own}") or style
            yield at, style


def _compute_with_parts(base: nn.Module, rules: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Let linear layers compute with plain tensors."""
    tensors = require("transformers.distributed.tensor_parallel", "tensor_parallel")
    modules = dict(base.named_modules())
    for name, rule in rules.items():
        module, style = modules.get(name), tensors.ALL_PARALLEL_STYLES[rule]
        if type(module) is not nn.Linear or not getattr(style, "use_local_output", False):
            continue
        if type(style) is tensors.ColwiseParallel:
            gathers = isinstance(style.output_layouts, Replicate)
            vars(module)["forward"] = by_columns(module, mesh, gathers=gathers)
        elif type(style) is tensors.RowwiseParallel:
            cuts = isinstance(style.input_layouts, Replicate)
            vars(module)["forward"] = by_rows(module, mesh, cuts=cuts)


def _computing(name: str, module: Any, style: str) -> list[str]:
    """The names of the layers that compute for a module with this style: several if it has adapters."""
    if isinstance(copies := getattr(module, "modules_to_save", None), nn.ModuleDict):
        return [f"{name}.original_module", *(f"{name}.modules_to_save.{key}" for key in copies)]
    if not isinstance(getattr(module, "base_layer", None), nn.Module):
        return [name]
    side = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style)
    if side is None or not isinstance(getattr(module, side, None), nn.ModuleDict):
        raise ArgumentError(
            f"tensor_parallel cannot cut the adapters of {name!r} ({type(module).__name__}, {style}); give "
            "LoRA other target_modules"
        )
    return [f"{name}.base_layer", *(f"{name}.{side}.{key}" for key in getattr(module, side))]


Forward = Callable[[Tensor], Tensor]


def by_columns(module: nn.Linear, mesh: DeviceMesh, *, gathers: bool) -> Forward:
    """The forward of a layer of which each rank has some outputs: [..., in] -> [..., out / t] or [..., out].

    gathers: whether every rank gets all outputs.
    """

    def forward(x: Tensor) -> Tensor:
        whole = _from(x, mesh, Replicate()).redistribute(placements=[Replicate()])
        # Each rank's gradient is only that of its outputs.
        found = linear(whole.to_local(grad_placements=[Partial()]), *_parts(module))
        if not gathers:
            return found
        shape: Any = (*found.shape[:-1], module.out_features)
        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(
            found, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride
        )
        return made.redistribute(placements=[Replicate()]).to_local()

    return forward


def by_rows(module: nn.Linear, mesh: DeviceMesh, *, cuts: bool) -> Forward:
    """The forward of a layer of which each rank has some inputs: [..., in / t] or [..., in] -> [..., out].

    cuts: whether every rank gets all inputs.
    """

    def forward(x: Tensor) -> Tensor:
        if cuts:
            x = _from(x, mesh, Replicate()).redistribute(placements=[Shard(-1)]).to_local()
        weight, bias = _parts(module)
        parts = _from(linear(x, weight), mesh, Partial())
        found = parts.redistribute(placements=[Replicate()]).to_local()
        return found if bias is None else found + bias

    return forward


def _from(x: Tensor, mesh: DeviceMesh, placement: Partial | Replicate) -> DTensor:
    return (
        x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [placement], run_check=False)
    )


def _parts(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """This rank's parts of the weight and of the bias."""
    weight, bias = module.weight, module.bias
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in (weight, bias)]
    return parts[0], parts[1]
