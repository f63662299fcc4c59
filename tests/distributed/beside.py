"""Train a sharded, compiled model and a replicated one side by side in every rank's process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from tests.device.choice import device_kind
from tests.distributed.models import Case, batch

TOLERANCE = 2e-5
"""Relative; both sides add the same fp32 numbers in different orders."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of most cases: unlike Adam, it does not magnify the rounding of gradients near zero."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Beside:
    """`model` sharded, `net` compiled, `plain` a replicated copy that trains on every rank's batches.

    caches_on_host: on a device with memory of its own, too, caches are on the host; else only if it is short.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        case: Case,
        *,
        optimizer: MakeOptimizer = sgd,
        options: dict[str, Any] | None = None,
        caches_on_host: bool = False,
        **shard_options: Any,
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.case = case
        self.plain = case.model()
        self.options = dict(options or {})
        if caches_on_host and device_kind() != "cpu":
            self.options["device_memory"] = 1  # byte
            shard_options.setdefault("gradient_on", "gpu")
        self.model = fcdp_compile.shard(copy.deepcopy(self.plain), mesh, **shard_options)
        self.net = self.compiled(self.model)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.use(optimizer)
        self.step = 0

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        """The sharded model and the replicated one."""
        return self.model, self.plain

    @property
    def counters(self) -> Any:
        """The sharded model's counters on this rank."""
        return state_of(self.model).counters

    def compiled(self, model: nn.Module) -> Any:
        """The model compiled with this pair's options."""
        return torch.compile(model, backend="fcdp", options=self.options)

    def use(self, optimizer: MakeOptimizer) -> None:
        """Replace both optimizers by new ones."""
        self.optimizer, self.plain_optimizer = (
            optimizer([p for p in m.parameters() if p.requires_grad]) for m in self.both
        )

    def data(self, step: int, rank: int | None = None) -> Tensor:
        """A batch, this rank's own by default."""
        return batch(self.case, step=step, rank=self.rank if rank is None else rank)

    def losses(self, step: int) -> tuple[float, float]:
        """This rank's loss from the training graph, and the plain model's loss, without a backward."""
        loss = self.case.loss(self.net, self.data(step)).item()
        with torch.no_grad():
            return loss, self.case.loss(self.plain, self.data(step)).item()

    def plain_backward(self, *steps: int) -> None:
        """Accumulate the plain model's gradient, averaged over every rank's batches."""
        for step in steps:
            for rank in range(self.world):
                (self.case.loss(self.plain, self.data(step, rank)) / self.world).backward()

    def train(self, steps: int = 1) -> None:
        """Train both for some steps; each loss must be the same."""
        for _ in range(steps):
            loss = self.case.loss(self.net, self.data(self.step))
            with torch.no_grad():
                expected = self.case.loss(self.plain, self.data(self.step)).item()
            assert_close(loss.item(), expected, f"loss of step {self.step}")
            loss.backward()
            self.plain_backward(self.step)
            self.optimize()
            self.step += 1

    def optimize(self) -> None:
        """Step both optimizers and drop the gradients."""
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def compare_parameters(self) -> None:
        """Every parameter must be the same on both sides."""
        expected = dict(self.plain.named_parameters())
        found = dict(self.model.named_parameters())
        assert list(found) == list(expected)
        for name, parameter in found.items():
            assert_close(whole(parameter), expected[name].detach(), name)

    def forget_rounding(self) -> None:
        """Copy the sharded values, once checked, to the plain model, as rounding adds up over many steps."""
        expected = dict(self.plain.named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                expected[name].copy_(whole(parameter))

    def compare_gradients(self) -> None:
        """Every gradient must be the same on both sides."""
        expected = dict(self.plain.named_parameters())
        for name, parameter in self.model.named_parameters():
            mine, other = parameter.grad, expected[name].grad
            assert (mine is None) == (other is None), f"gradient of {name}: {mine} against {other}"
            if mine is not None and other is not None:
                assert_close(whole(mine), other, f"gradient of {name}")


def named(model: nn.Module, name: str) -> Any:
    """The parameter whose qualified name ends in `name`."""
    (found,) = (p for n, p in model.named_parameters() if f".{n}".endswith(f".{name}"))
    return found


def whole(tensor: Tensor) -> Tensor:
    """The full value of a parameter or gradient; every rank must call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(found: Tensor | float, expected: Tensor | float, what: str) -> None:
    """Both must agree within TOLERANCE of the largest value, as even elements near zero have its rounding."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    if not a.numel():
        return
    error = (a - b).abs().max().item() / max(b.abs().max().item(), 1e-2)
    assert error <= TOLERANCE, f"{what} is off by {error:.1e}: {a} instead of {b}"
