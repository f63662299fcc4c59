"""A write to a parameter inside a forward would be lost, and is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

import fcdp_compile
from fcdp_compile.errors import FcdpError


class Writes(nn.Module):
    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.inner.weight)
        return self.inner(x)


def _add(weight: Tensor) -> None:
    data = weight.data
    data += 1


def _set(weight: Tensor) -> None:
    weight.detach().view(-1)[3] = 0.0


def _run(write: Callable[[Tensor], object]) -> Tensor:
    torch._dynamo.reset()
    model = fcdp_compile.shard(Writes(write))
    result: Tensor = torch.compile(model, backend="fcdp")(torch.ones(2, 4))
    return result


@pytest.mark.parametrize(
    ("write", "line"),
    [(lambda w: w.data.clamp_(-0.1, 0.1), "clamp_"), (_add, "data \\+= 1"), (_set, "view.*= 0.0")],
)
def test_a_write_in_a_forward_is_refused(write: Callable[[Tensor], object], line: str) -> None:
    """The message has the line that writes, without the marks that Python puts below the line."""
    why = rf"writes to parameter 'inner\.weight' \([^^]*{line}[^^]*\), which.*would be lost"
    with pytest.raises(Exception, match=why):
        _run(write)


@pytest.mark.parametrize("backend", [None, "fcdp"])
def test_an_embedding_that_renormalises_its_weight_is_refused(backend: str | None) -> None:
    torch._dynamo.reset()
    model = fcdp_compile.shard(nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)))
    net = torch.compile(model, backend=backend) if backend else model
    with pytest.raises(Exception, match=r"writes to parameter '0\.weight'.*would be lost"):
        net(torch.zeros(2, dtype=torch.long)).sum().backward()


@torch.no_grad()
def _halve(weight: Tensor) -> None:
    weight.mul_(0.5)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", [_halve, _set])
def test_a_write_in_a_forward_that_is_not_compiled_is_refused(
    write: Callable[[Tensor], object], mode: Callable[[], AbstractContextManager[None]]
) -> None:
    model = fcdp_compile.shard(Writes(write))
    with (
        mode(),
        pytest.raises(
            FcdpError, match=r"writes to parameter 'inner\.weight' \(in Writes\.forward\)"
        ),
    ):
        model(torch.ones(2, 4))


def test_an_error_of_the_forward_itself_is_not_hidden_by_a_write() -> None:
    def write(weight: Tensor) -> None:
        _halve(weight)
        raise ValueError("of the forward")

    with pytest.raises(ValueError, match="of the forward"):
        fcdp_compile.shard(Writes(write))(torch.ones(2, 4))


@pytest.mark.parametrize("read", [lambda w: w.clone().mul_(2), lambda w: (w * 2).add_(1)])
def test_a_write_to_something_computed_is_not(read: Callable[[Tensor], object]) -> None:
    assert _run(read).shape == (2, 4)


def test_parameters_that_share_memory_are_refused() -> None:
    model = nn.Linear(4, 4)
    model.twin = nn.Parameter(model.weight.detach().view(-1)[4:8])
    with pytest.raises(ValueError, match="'weight' and 'twin' share memory"):
        fcdp_compile.shard(model)


def test_an_expanded_parameter_is_refused() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(1).expand(4))
    with pytest.raises(ValueError, match="holds each value several times"):
        fcdp_compile.shard(model)


def test_neighbours_in_one_storage_are_not() -> None:
    flat = torch.arange(8.0)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    fcdp_compile.shard(model)
