"""Home nodes of matrices, Newton-Schulz, and optimizers that are combined: no process group."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import fcdp_compile
from fcdp_compile.core.sharding import refusals
from fcdp_compile.errors import ArgumentError
from fcdp_compile.optimizers.muon import newton_schulz
from fcdp_compile.strategy.home_nodes import balanced, home_nodes

sides = st.integers(1, 4096)
matrices = st.lists(st.tuples(st.tuples(sides, sides), st.sampled_from([2, 4])), max_size=40)


@given(matrices, st.integers(1, 16))
def test_no_node_has_more_than_its_share_and_one_matrix(
    given_matrices: list[tuple[tuple[int, int], int]], nodes: int
) -> None:
    chosen = home_nodes(given_matrices, nodes)
    assert all(0 <= node < nodes for node in chosen)
    sizes = [a * b * itemsize for (a, b), itemsize in given_matrices]
    one_cost = balanced([(float(n),) for n in sizes], nodes)
    for node in range(nodes):
        own = sum(n for n, at in zip(sizes, one_cost, strict=True) if at == node)
        assert own <= sum(sizes) / nodes + max(sizes, default=0)


def test_layers_of_a_transformer_are_balanced_in_bytes_and_flops_and_along_the_model() -> None:
    h, kv, wide = 2048, 512, 5632
    layer = [(h, h), (kv, h), (kv, h), (h, h), (wide, h), (wide, h), (h, wide)]
    shapes = layer * 22
    for nodes in (2, 4, 8, 16):
        chosen = home_nodes([(s, 4) for s in shapes], nodes)
        elements = [0] * nodes
        for shape, node in zip(shapes, chosen, strict=True):
            elements[node] += shape[0] * shape[1]
        assert max(elements) < 1.1 * sum(elements) / nodes
        for first in range(0, len(shapes) - 4 * nodes, nodes):
            assert set(chosen[first : first + 4 * nodes]) == set(range(nodes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_newton_schulz_is_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grads = torch.randn(3, 6, 10)
    plain = [nn.Parameter(torch.zeros(6, 10)) for _ in range(3)]
    for p, grad in zip(plain, grads, strict=True):
        p.grad = grad
    torch.optim.Muon(plain, lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    found = newton_schulz(grads.to(dtype), (3.4445, -4.775, 2.0315), 5, 1e-7)
    for p, of_one in zip(plain, found, strict=True):
        torch.testing.assert_close(-p.detach(), of_one.float(), rtol=0.05, atol=0.02)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


def _two(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    return fcdp_compile.Muon(matrices, lr=0.02), AdamW(vectors, lr=0.01)


def _step(model: nn.Module, optimizers: tuple[Optimizer, ...], schedulers: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(3, 4)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for scheduler in schedulers:
        scheduler.step()


def _same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def test_combined_optimizers_are_the_separate_ones() -> None:
    apart, together = _model(), _model()
    two, combined = _two(apart), fcdp_compile.combine(*_two(together))
    assert combined.state.get(together[0].weight) is None  # type: ignore[index, union-attr]
    assert not combined.state
    two[0].load_state_dict(two[0].state_dict())  # which gives it new groups
    combined.optimizers[0].load_state_dict(two[0].state_dict())  # type: ignore[attr-defined]
    schedules = [StepLR(optimizer, 1, 0.5) for optimizer in (*two, combined)]
    for seed in range(3):
        _step(apart, two, schedules[:2], seed)
        _step(together, (combined,), schedules[2:], seed)
    assert _same(apart, together)
    assert len(combined.state) == 4
    loaded = copy.deepcopy(together)
    again = fcdp_compile.combine(*_two(loaded))
    again.load_state_dict(copy.deepcopy(combined.state_dict()))
    pair = copy.deepcopy((loaded, again))
    for model, optimizer in ((together, combined), (loaded, again), pair):
        _step(model, (optimizer,), (), 9)
    assert _same(together, loaded)
    assert _same(together, pair[0])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda m: fcdp_compile.combine(), "needs at least one"),
        (lambda m: fcdp_compile.combine(m), "takes torch optimizers, not Sequential"),
        (
            lambda m: fcdp_compile.combine(_two(m)[0], SGD(m.parameters())),
            "Muon and SGD both have a parameter",
        ),
        (
            lambda m: fcdp_compile.combine(*_two(m)).add_param_group(
                {"params": [nn.Parameter(torch.ones(2))]}
            ),
            "cannot know which of its optimizers",
        ),
    ],
)
def test_optimizers_that_cannot_be_combined(make: Callable[[nn.Module], Any], problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem):
        make(_model())


@pytest.mark.parametrize(
    ("params", "options", "problem"),
    [
        ([(2, 3)], {"ns_steps": 100}, "up to 99 steps with 3 coefficients"),
        ([(2, 3)], {"ns_coefficients": (1.0, 2.0)}, "up to 99 steps with 3 coefficients"),
        ([(2, 3), (2,)], {}, r"not a parameter of shape \(2,\)"),
        ([{"params": [], "ns_dtype": torch.half}], {}, "ns_dtype is the same"),
    ],
)
def test_what_muon_does_not_take(params: list[Any], options: Any, problem: str) -> None:
    given = [nn.Parameter(torch.ones(p)) if isinstance(p, tuple) else p for p in params]
    with pytest.raises(ArgumentError, match=problem):
        fcdp_compile.Muon(given, **options)
    optimizer = fcdp_compile.Muon([nn.Parameter(torch.ones(2, 2))], ns_dtype=torch.half)
    with pytest.raises(ArgumentError, match="not a parameter of shape"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1
    assert copy.deepcopy(optimizer)._ns_dtype is torch.half


def test_torch_without_rules_for_home_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "calls_dispatch_of_subclasses", lambda: False)
    refusals.check_home_nodes([], None)
    with pytest.raises(ArgumentError, match=r"'matrix' needs torch 2.12 or newer, not 2"):
        refusals.check_home_nodes([nn.Parameter(torch.ones(2, 2))], None)
