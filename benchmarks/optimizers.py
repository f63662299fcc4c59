"""Every optimizer on home shards of 2 x 2 ranks: right or refused, and its bytes between nodes in a step.

    python -m benchmarks.optimizers               the table of docs/optimizers.md, on two nodes of two ranks

The reference is an equal model on one rank with the whole batch.  Bytes count the collectives in `step` as if
rings sent them: no part of a node's data leaves the node twice.  Optimizers of packages that are not
installed have no row.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fcdp_compile
from benchmarks.launch import on_ranks
from fcdp_compile.torch_compat import DispatchMode

NODES, RANKS_PER_NODE = 2, 2
STEPS = 4
_LR = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One optimizer with some of its options.

    module: the module of its class.  matrices_only: whether it steps only parameters with two dimensions.
    strategy: of the model.  width: a factor of the sides of the model's matrices; torchao quantises no small
    states.  compiles: whether the step compiles itself, which a count of its collectives would prevent.
    """

    name: str
    options: dict[str, Any]
    module: str = "torch.optim"
    matrices_only: bool = False
    strategy: str = "fcdp"
    width: int = 1
    compiles: bool = False

    @property
    def title(self) -> str:
        """Its name in the table."""
        given = ", ".join(f"{k}={v}" for k, v in self.options.items() if k not in _ALWAYS)
        package = "" if self.module == "torch.optim" else self.module.split(".")[0] + " "
        return f"{package}{self.name}" + (f" ({given})" if given else "")

    @property
    def dtype(self) -> torch.dtype:
        """fp64 if the optimizer supports it, so that only mistakes make a difference, and not rounding."""
        return torch.float64 if self.module == "torch.optim" else torch.float32

    def build(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Make the optimizer of some parameters."""
        mine = [p for p in parameters if p.dim() == 2 or not self.matrices_only]
        made: Optimizer = getattr(importlib.import_module(self.module), self.name)(
            mine, **self.options
        )
        return made


_ALWAYS = ("lr", "min_8bit_size", "max_iter")


def _of_torch(name: str, *, matrices_only: bool = False, **options: Any) -> Case:
    return Case(name=name, options={"lr": _LR, **options}, matrices_only=matrices_only)


def _eight_bit(name: str, **options: Any) -> Case:
    return Case(name=name, module="bitsandbytes.optim", options={"lr": _LR, **options})


def _of_torchao(name: str, **options: Any) -> Case:
    return Case(
        name=name, module="torchao.optim", options={"lr": _LR, **options}, width=4, compiles=True
    )


CASES = (
    _of_torch("SGD", momentum=0.9),
    _of_torch("SGD", momentum=0.9, fused=True),
    _of_torch("Adam"),
    _of_torch("AdamW"),
    _of_torch("AdamW", foreach=False),
    _of_torch("AdamW", fused=True),
    _of_torch("AdamW", amsgrad=True),
    _of_torch("Adagrad"),
    _of_torch("Adagrad", fused=True),
    _of_torch("Adadelta"),
    _of_torch("Adamax"),
    _of_torch("ASGD"),
    _of_torch("NAdam"),
    _of_torch("RAdam"),
    _of_torch("RMSprop", momentum=0.9),
    _of_torch("Rprop"),
    _of_torch("Adafactor"),
    _of_torch("Adafactor", foreach=True),
    _of_torch("Muon", matrices_only=True),
    Case(
        name="Muon",
        module="fcdp_compile",
        options={"lr": _LR},
        matrices_only=True,
        strategy="fcdp+matrix",
    ),
    _of_torch("LBFGS", lr=0.5, max_iter=2),
    _of_torch("LBFGS", lr=0.5, max_iter=2, line_search_fn="strong_wolfe"),
    _of_torch("SparseAdam"),
    Case(name="Adafactor", module="transformers.optimization", options={}),
    _of_torchao("AdamW8bit"),
    _of_torchao("AdamW4bit"),
    _of_torchao("AdamWFp8"),
    _eight_bit("Adam8bit", min_8bit_size=16),
    _eight_bit("AdamW8bit", min_8bit_size=16),
    _eight_bit("SGD8bit", momentum=0.9, min_8bit_size=16),
    _eight_bit("RMSprop8bit", min_8bit_size=16),
    _eight_bit("Lion8bit", min_8bit_size=16),
    _eight_bit("AdEMAMix8bit", min_8bit_size=16),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOutcome:
    """The result of one optimizer: the largest difference of a parameter, or why the optimizer is refused.

    gap: relative to the largest change of a parameter of the reference.
    inter_bytes: sent from one node to others in one step.  weight_bytes: W of the stepped parameters.
    """

    gap: float | None
    refusal: str | None
    inter_bytes: int
    weight_bytes: int


def measure(mesh: DeviceMesh, case: Case) -> OptimizerOutcome:
    """Train with an optimizer on all ranks and on one; all ranks must call this."""
    reference, model = _model(case), _model(case)
    before = [p.detach().clone() for p in reference.parameters()]
    fcdp_compile.shard(model, mesh, strategy=case.strategy)
    traffic = _Traffic(mesh)
    stepped = [p for p in reference.parameters() if p.dim() == 2 or not case.matrices_only]
    weight_bytes = sum(p.nbytes for p in stepped)
    try:
        plain, sharded = case.build(reference.parameters()), case.build(model.parameters())
        for step in range(STEPS):
            torch.manual_seed(step)
            batch = torch.randn(4 * dist.get_world_size(), 40 * case.width, dtype=case.dtype)
            mine = batch.view(dist.get_world_size(), 4, -1)[dist.get_rank()]
            _step(plain, partial(_loss, reference, batch), None)
            _step(sharded, partial(_loss, model, mine), None if case.compiles else traffic)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
        # Refusals of torch and of other libraries have no class in common; the table shows them.
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return OptimizerOutcome(gap=None, refusal=why, inter_bytes=0, weight_bytes=weight_bytes)
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    gap = max(float((_whole(p) - q).detach().abs().max()) for p, q in pairs)
    change = max(
        float((q.detach() - b).abs().max())
        for q, b in zip(reference.parameters(), before, strict=True)
    )
    return OptimizerOutcome(
        gap=gap / change,
        refusal=None,
        inter_bytes=traffic.inter_bytes // STEPS,
        weight_bytes=weight_bytes,
    )


def _model(case: Case) -> nn.Sequential:
    """Make a model with row counts that four ranks can split evenly, and row counts that they cannot."""
    torch.manual_seed(0)
    a, b, c, d = (side * case.width for side in (40, 64, 49, 33))
    layers = nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c), nn.Tanh(), nn.Linear(c, d))
    return layers.to(case.dtype)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _step(optimizer: Optimizer, loss_of: Callable[[], Tensor], traffic: _Traffic | None) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's has no types
        mean = loss.detach().clone()
        if traffic is not None:  # a line search must see the same loss on every rank
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return mean

    if isinstance(optimizer, torch.optim.LBFGS):
        if traffic is None:
            optimizer.step(closure)
        else:
            with traffic:
                optimizer.step(closure)
        return
    closure()
    if traffic is None:
        optimizer.step()
    else:
        with traffic:
            optimizer.step()


class _Traffic(DispatchMode):
    """Adds up the bytes that one of two nodes sends to the other in collectives."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.inter_bytes = 0
        groups = [mesh.get_group("inter"), mesh.get_group("intra"), dist.group.WORLD]
        self._ranks = {
            g.group_name: dist.get_process_group_ranks(g) for g in groups if g is not None
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor then runs ops on local tensors, which come here
        if func.overloadpacket in _COLLECTIVES:
            self.inter_bytes += _inter_bytes(func.overloadpacket, args, self._ranks[args[-1]])
        return func(*args, **(kwargs or {}))


_FUNCTIONAL = torch.ops._c10d_functional
_COLLECTIVES = {
    _FUNCTIONAL.all_gather_into_tensor,
    _FUNCTIONAL.all_reduce,
    _FUNCTIONAL.all_to_all_single,
    _FUNCTIONAL.reduce_scatter_tensor,
}


def _inter_bytes(collective: Any, args: Sequence[Any], ranks: Sequence[int]) -> int:
    """Return a node's bytes for a collective, in all groups between nodes or in the group of all ranks."""
    size = args[0].nbytes
    nodes = {rank // RANKS_PER_NODE for rank in ranks}
    if len(nodes) == 1:
        return 0
    groups = RANKS_PER_NODE if len(ranks) == len(nodes) else 1
    whole = size * len(ranks) if collective is _FUNCTIONAL.all_gather_into_tensor else size
    times = 2 if collective is _FUNCTIONAL.all_reduce else 1
    return groups * times * whole * (len(ranks) - 1) // len(ranks)


def table(outcomes: Sequence[tuple[Case, OptimizerOutcome]]) -> str:
    """Return the table of the documentation."""
    rows = [
        (
            case.title,
            "right" if found.refusal is None else "refused",
            "" if found.gap is None else f"{found.gap:.0e}",
            _between(case, found),
            found.refusal or "",
        )
        for case, found in outcomes
    ]
    headers = ("optimizer", "result", "gap", "between nodes", "why")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _between(case: Case, found: OptimizerOutcome) -> str:
    if found.gap is None or case.compiles:
        return ""
    return f"{found.inter_bytes / found.weight_bytes:.2f} W"


def main() -> None:
    """Run every case on four ranks of this machine; rank 0 prints the table."""
    if "RANK" not in os.environ:
        # torch's cache of graphs does not tell DTensors apart whose local tensors are of different classes.
        os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
        sys.exit(on_ranks(4, "-m", "benchmarks.optimizers", *sys.argv[1:]))
    mesh = fcdp_compile.make_mesh(nodes=NODES)
    assert mesh is not None, "four ranks run"
    cases = [
        c for c in CASES if _is_installed(c.module) and (not sys.argv[1:] or c.name in sys.argv[1:])
    ]
    outcomes = [(case, measure(mesh, case)) for case in cases]
    if dist.get_rank() == 0:
        print(table(outcomes))
    dist.destroy_process_group()


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.split(".")[0]) is not None


if __name__ == "__main__":
    main()
