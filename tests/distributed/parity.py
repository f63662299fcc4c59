"""Train a sharded model and a plain replicated one in every rank's process, and compare.

The reference uses no code of fcdp: each rank holds an unsharded copy of the model, runs every rank's batch
through the copy and averages the gradients itself.

[Note: tolerances]
fp32: 1e-5 relative.  The error of a loss is relative to the loss; the error of each element of a gradient or
parameter is relative to the tensor's largest element, because sums in another order err by a fraction of
their largest terms.  If the largest element is below the floor, the error is relative to the floor: gradients
that are zero in exact arithmetic (a bias that softmax cancels) are rounding noise of about 1e-9.  For the
same reason AdamW's eps is not its default of 1e-8, which would magnify such noise to full steps.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fcdp_compile
from fcdp_compile import Strategy
from tests.distributed.models import CASES, batch, checkpointing

RELATIVE = 1e-5
GRADIENT_FLOOR, PARAMETER_FLOOR = 1e-3, 1e-2  # see [Note: tolerances]
LEARNING_RATE, EPSILON = 1e-3, 1e-5
BUCKET_MB = 0.05  # several buckets even in these small models


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training run.  compute: None for the uncompiled model."""

    case: str
    compute: str | None = "eager"
    strategy: str | Strategy = "fcdp"
    is_checkpointed: bool = False
    steps: int = 20
    gradients_compared: int = 3


class Sharded:
    """A trial's model: `model` is sharded, `net` compiled, `plain` a copy from before the sharding."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        trial: Trial,
        *,
        options: dict[str, Any] | None = None,
        **shard_options: Any,
    ) -> None:
        fresh()
        self.case = CASES[trial.case]
        self.rank, self.ranks = rank_and_ranks(mesh)
        self.model = build(trial)
        self.plain = copy.deepcopy(self.model)
        fcdp_compile.shard(self.model, mesh, strategy=trial.strategy, **shard_options)
        self.net = compile_with(self.model, trial.compute, **(options or {}))
        self.optimizer = adamw(self.model)

    def batches(self, step: int, **more: Any) -> list[Tensor]:
        """Every rank's batch, in order."""
        return [batch(self.case, step=step, rank=r, **more) for r in range(self.ranks)]

    def loss(self, ids: Tensor) -> Tensor:
        return self.case.loss(self.net, ids)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def rank_and_ranks(mesh: DeviceMesh | None) -> tuple[int, int]:
    return (0, 1) if mesh is None else (dist.get_rank(), dist.get_world_size())


def build(trial: Trial) -> nn.Module:
    torch.manual_seed(0)
    model = CASES[trial.case].model()
    return checkpointing(model) if trial.is_checkpointed else model


def compile_with(model: nn.Module, compute: str | None, **options: Any) -> Any:
    """The compiled model, which torch types as a function; with compute None, the model itself."""
    if compute is None:
        return model
    return torch.compile(
        model, backend="fcdp", options={"compute": compute, "bucket_mb": BUCKET_MB, **options}
    )


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return adamw_of(p for p in model.parameters() if p.requires_grad)


def adamw_of(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPSILON)


def whole(tensor: Tensor) -> Tensor:
    """A tensor of the full shape, whether it is sharded or not."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def values(model: nn.Module) -> dict[str, Tensor]:
    return {n: whole(p) for n, p in model.named_parameters()}


def history(mine: Sharded, steps: int) -> dict[str, Tensor]:
    """Train; returns the losses and gradients of every step, and the parameters after the last."""
    found: dict[str, Tensor] = {}
    for step in range(steps):
        loss = mine.loss(mine.batches(step)[mine.rank])
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        found |= {f"gradient {step} of {n}": g for n, g in gradients(mine.model).items()}
        mine.step()
    return found | values(mine.model)


class Replica:
    """Plain training on every rank's batch, in this process alone."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
        self.model = model
        self._loss = loss
        self._optimizer = adamw(self.model)

    def backward(self, batches: Sequence[Tensor]) -> list[float]:
        """Leave the gradients, averaged over the batches, in the model; returns each batch's loss."""
        losses = []
        for ids in batches:
            loss = self._loss(self.model, ids)
            (loss / len(batches)).backward()
            losses.append(loss.item())
        return losses

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def check_trial(mesh: DeviceMesh | None, trial: Trial) -> None:
    """Train both, and compare losses at every step, gradients at first and parameters at last."""
    mine = Sharded(mesh, trial)
    replica = Replica(mine.plain, mine.case.loss)
    for step in range(trial.steps):
        batches = mine.batches(step)
        loss = mine.loss(batches[mine.rank])
        loss.backward()
        expected = replica.backward(batches)[mine.rank]
        about = f"{trial}, step {step}"
        assert abs(loss.item() - expected) <= RELATIVE * abs(expected), (
            f"{about}: loss {loss.item()}, expected {expected}"
        )
        if step < trial.gradients_compared:
            check_close(
                about, gradients(mine.model), gradients(replica.model), floor=GRADIENT_FLOOR
            )
        mine.step()
        replica.step()
    check_close(
        f"{trial}, at last", values(mine.model), values(replica.model), floor=PARAMETER_FLOOR
    )


def check_trials(mesh: DeviceMesh | None, trials: Iterable[Trial]) -> None:
    """Run many trials in one process group, as starting ranks takes longer than a trial."""
    for trial in trials:
        check_trial(mesh, trial)


def fresh() -> None:
    """Drop compiled code and the objects that it holds."""
    torch._dynamo.reset()
    gc.collect()


class Difference(NamedTuple):
    """How far two tensors are apart, relative to the largest element; infinite or NaN if an element is."""

    relative: float
    name: str


def check_close(
    about: str,
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    floor: float,
    relative: float = RELATIVE,
) -> None:
    found = worst(about, actual, expected, floor=floor)
    assert found.relative <= relative, (
        f"{about}: {found.name} differs by {found.relative:.1e} of its largest element"
    )


def worst(
    about: str, actual: dict[str, Tensor], expected: dict[str, Tensor], *, floor: float
) -> Difference:
    """The largest difference of all pairs of tensors, which must be of the same names, shapes and dtypes."""
    assert actual.keys() == expected.keys(), f"{about}: {actual.keys() ^ expected.keys()}"
    found = Difference(0.0, "")
    for name, value in expected.items():
        assert actual[name].shape == value.shape, f"{about}: shape of {name}"
        assert actual[name].dtype == value.dtype, f"{about}: dtype of {name}"
        if not value.numel():
            continue
        error = (actual[name] - value).abs().max().item()
        one = error / max(value.abs().max().item(), floor)
        if not one <= found.relative:  # so that NaN counts as the worst
            found = Difference(one, name)
        if math.isnan(one):
            break
    return found


def check_equal(about: str, actual: Any, expected: Any) -> None:
    """Both must be equal bitwise."""
    assert actual.keys() == expected.keys(), f"{about}: {actual.keys() ^ expected.keys()}"
    different = [n for n in expected if not torch.equal(actual[n], expected[n])]
    assert not different, f"{about}: {different} differ"


def product(**axes: Sequence[Any]) -> list[Trial]:
    """A trial for each combination."""
    return [
        Trial(**dict(zip(axes, chosen, strict=True)))
        for chosen in itertools.product(*axes.values())
    ]
