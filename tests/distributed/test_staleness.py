"""Every way to change a parameter: training never goes on with values gathered before the change.

`test_staleness_between` is about changes between a forward and its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.core.sharding.shard import state_of
from tests.device.choice import seeded
from tests.distributed.beside import TOLERANCE, Beside, assert_close, named, sgd, whole
from tests.distributed.models import CASES, Case, Odd, with_lora
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

_OPTIONS = {
    "bucket_mb": 300 / 2**20
}  # several buckets, so that refreshing one and all are not the same


# --- changes: each is applied to both models ------------------------------------------------------------


def _shifted(model: nn.Module) -> dict[str, Tensor]:
    return {name: value * 0.75 + 0.01 for name, value in model.state_dict().items()}


def _each(pair: Beside, change: Callable[[nn.Module], Any]) -> None:
    for model in pair.both:
        change(model)


def _step_with(make: Callable[..., torch.optim.Optimizer], pair: Beside, **options: Any) -> None:
    """Take one step of this kind of optimizer, after a backward, which changes no parameter."""
    pair.use(lambda parameters: make(parameters, lr=0.05, **options))
    pair.train()
    pair.use(sgd)


def _load_root(pair: Beside) -> None:
    _each(pair, lambda m: m.load_state_dict(_shifted(m)))


def _load_submodule(pair: Beside) -> None:
    def load(model: nn.Module) -> None:
        (inner,) = (m for n, m in model.named_modules() if n.split(".")[-1] == "second")
        inner.load_state_dict(_shifted(inner))

    _each(pair, load)


def _in_place(pair: Beside, name: str) -> None:
    with torch.no_grad():
        _each(pair, lambda m: named(m, name).mul_(0.5))


def _in_place_foreach(pair: Beside) -> None:
    with torch.no_grad():
        _each(pair, lambda m: torch._foreach_mul_([p for p in m.parameters() if p.numel()], 0.8))


def _data_multiplied(pair: Beside, name: str) -> None:
    _each(pair, lambda m: named(m, name).data.mul_(-1.5))


def _data_added(pair: Beside, name: str) -> None:
    def change(model: nn.Module) -> None:
        named(model, name).data += 1.0

    _each(pair, change)


def _data_assigned(pair: Beside, name: str) -> None:
    def change(model: nn.Module) -> None:
        p = named(model, name)
        p.data = p.detach() * 0.5

    _each(pair, change)


def _data_assigned_whole(pair: Beside, name: str) -> None:
    def change(model: nn.Module) -> None:
        p = named(model, name)
        generator = seeded(5)
        p.data = torch.randn(p.shape, generator=generator)

    _each(pair, change)


def _local_on_one_rank(pair: Beside, name: str, by_attribute: bool) -> None:
    mine, plain = (named(m, name) for m in pair.both)
    if pair.rank == 0:  # it has the first chunk, which is never empty
        with torch.no_grad():
            (mine._local_tensor if by_attribute else mine.to_local()).mul_(-2.0).add_(1.0)
    with torch.no_grad():
        plain.copy_(whole(mine))


def _local_on_all_ranks(pair: Beside, name: str) -> None:
    with torch.no_grad():
        named(pair.model, name).to_local().mul_(0.5)
        named(pair.plain, name).mul_(0.5)


def _swapped_rows(pair: Beside, name: str) -> None:
    """A change that leaves every sum of the values unchanged."""

    def change(model: nn.Module) -> None:
        p = named(model, name)
        p.data = whole(p).flip(0)

    _each(pair, change)


def _freeze(pair: Beside, name: str) -> None:
    _each(pair, lambda m: named(m, name).requires_grad_(False))
    pair.use(sgd)
    pair.train(2)


def _unfreeze(pair: Beside, name: str) -> None:
    _each(pair, lambda m: named(m, name).requires_grad_(True))
    pair.use(sgd)
    pair.train(2)


def _merged(pair: Beside) -> None:
    """Merge, compute with the merged weights, take the adapters out again."""
    _each(pair, lambda m: m.merge_adapter())
    compare_losses(pair)
    pair.compare_parameters()
    _each(pair, lambda m: m.unmerge_adapter())


def _changed_while_merged(pair: Beside) -> None:
    pair.train()
    _each(pair, lambda m: m.merge_adapter())
    compare_losses(pair)
    _data_multiplied(pair, "second.base_layer.weight")
    compare_losses(pair)
    _each(pair, lambda m: m.unmerge_adapter())


def _other_adapter(pair: Beside, name: str) -> None:
    _each(pair, lambda m: m.set_adapter(name))
    pair.use(sgd)


def _changed_while_inactive(pair: Beside, name: str) -> None:
    _data_multiplied(pair, f"first.lora_B.{name}.weight")
    _other_adapter(pair, name)


def _disabled(pair: Beside) -> None:
    with pair.model.disable_adapter(), pair.plain.disable_adapter():
        compare_losses(pair)
    _data_multiplied(pair, "norm.weight")


FULL: dict[str, Callable[[Beside], None]] = {
    "sgd": partial(_step_with, torch.optim.SGD),
    "adamw-for-loop": partial(_step_with, torch.optim.AdamW, foreach=False),
    "adamw-foreach": partial(_step_with, torch.optim.AdamW, foreach=True),
    "adamw-fused": partial(_step_with, torch.optim.AdamW, fused=True),
    "load_state_dict": _load_root,
    "load_state_dict of a submodule": _load_submodule,
    "in place": partial(_in_place, name="first.weight"),
    "in place, scalar": partial(_in_place, name="scale"),
    "in place, bias": partial(_in_place, name="norm.bias"),
    "in place, foreach": _in_place_foreach,
    "data multiplied": partial(_data_multiplied, name="first.weight"),
    "data added": partial(_data_added, name="first.bias"),
    "data assigned": partial(_data_assigned, name="second.weight"),
    "data assigned, whole tensor": partial(_data_assigned_whole, name="first.weight"),
    "data assigned, whole scalar": partial(_data_assigned_whole, name="scale"),
    "data assigned, rows swapped": partial(_swapped_rows, name="embedding.weight"),
    "local tensor on all ranks": partial(_local_on_all_ranks, name="first.weight"),
    "_local_tensor on one rank": partial(
        _local_on_one_rank, name="second.weight", by_attribute=True
    ),
    "to_local() on one rank": partial(_local_on_one_rank, name="first.bias", by_attribute=False),
    "freeze": partial(_freeze, name="first.weight"),
    "change while frozen": partial(_data_multiplied, name="first.weight"),
    "unfreeze": partial(_unfreeze, name="first.weight"),
    "freeze again": partial(_freeze, name="first.weight"),
    "change while frozen again": partial(_data_added, name="first.weight"),
    "unfreeze again": partial(_unfreeze, name="first.weight"),
}

LORA: dict[str, Callable[[Beside], None]] = {
    "adamw-for-loop": partial(_step_with, torch.optim.AdamW, foreach=False),
    "adamw-foreach": partial(_step_with, torch.optim.AdamW, foreach=True),
    "adamw-fused": partial(_step_with, torch.optim.AdamW, fused=True),
    "load_state_dict": _load_root,
    "load_state_dict of a submodule": _load_submodule,
    "frozen in place": partial(_in_place, name="embedding.weight"),
    "frozen data multiplied": partial(_data_multiplied, name="first.base_layer.weight"),
    "frozen data added": partial(_data_added, name="first.base_layer.bias"),
    "frozen data assigned": partial(_data_assigned, name="norm.weight"),
    "frozen data assigned, whole": partial(_data_assigned_whole, name="embedding.weight"),
    "frozen _local_tensor on one rank": partial(
        _local_on_one_rank, name="embedding.weight", by_attribute=True
    ),
    "adapter data multiplied": partial(_data_multiplied, name="first.lora_B.default.weight"),
    "adapter on one rank": partial(
        _local_on_one_rank, name="first.lora_A.default.weight", by_attribute=False
    ),
    "merge and unmerge": _merged,
    "change while merged": _changed_while_merged,
    "set_adapter": partial(_other_adapter, name="other"),
    "change while inactive": partial(_changed_while_inactive, name="default"),
    "disable_adapter": _disabled,
    "unfreeze": partial(_unfreeze, name="embedding.weight"),
    "freeze": partial(_freeze, name="embedding.weight"),
}


def _two_adapters() -> nn.Module:
    model = with_lora(Odd(), "first", "second")
    model.add_adapter("other", model.peft_config["default"])  # type: ignore[operator, union-attr, index]
    return model


_TWO_ADAPTERS = Case(
    model=_two_adapters, loss=CASES["odd-lora"].loss, vocabulary=CASES["odd"].vocabulary
)


# --- the job --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The effects of one change on one rank.

    before, after: loss on one batch.  expected: the plain model's loss afterwards.  idle_bytes: bytes that a
    forward without a change gathers between nodes.  refreshed_bytes: the bytes of the change and the next
    forward.  expected_bytes: slots of the buckets with changed parameters; None if the change trains or
    compiles.
    """

    before: float
    after: float
    expected: float
    idle_bytes: int
    refreshed_bytes: int
    expected_bytes: int | None


def compare_losses(pair: Beside) -> tuple[float, float]:
    loss, expected = pair.losses(1000)
    assert_close(loss, expected, "loss")
    return loss, expected


def _inter(pair: Beside) -> int:
    sent: int = pair.counters.sent.get("inter_all_gather", 0)
    return sent


def _slots_of_changed(pair: Beside, before: dict[str, Tensor]) -> int:
    """The bytes that a rank must send to refresh the buckets of the parameters that differ."""
    state = state_of(pair.model)
    changed = [n for n, p in pair.plain.named_parameters() if not torch.equal(p, before[n])]
    keys = {record.spec.name: key for key, record in state.records.items()}
    known = {
        key: [b.bucket for b in found] for key in state.records if (found := state.buckets.of(key))
    }
    frozen = {n: not p.requires_grad for n, p in pair.plain.named_parameters()}
    buckets = {
        next(b for b in known[keys[n]] if b.frozen == frozen[n])
        for n in changed
        if keys[n] in known
    }
    return sum(b.slot_bytes * (state.topology.nodes - 1) for b in buckets)


def _apply(pair: Beside, change: Callable[[Beside], None]) -> Seen:
    pair.losses(1000)  # refreshes after the last change's optimizer steps
    sent = _inter(pair)
    before, _ = pair.losses(1000)
    idle = _inter(pair) - sent
    values = {n: p.detach().clone() for n, p in pair.plain.named_parameters()}
    graphs, steps = len(state_of(pair.model).plans), pair.step
    sent = _inter(pair)
    change(pair)
    after, expected = pair.losses(1000)
    refreshed = _inter(pair) - sent
    is_simple = len(state_of(pair.model).plans) == graphs and pair.step == steps
    seen = Seen(
        before=before,
        after=after,
        expected=expected,
        idle_bytes=idle,
        refreshed_bytes=refreshed,
        expected_bytes=_slots_of_changed(pair, values) if is_simple else None,
    )
    pair.train(2)
    pair.compare_parameters()
    pair.forget_rounding()
    return seen


def _all_changes(mesh: DeviceMesh, kind: str) -> dict[str, Seen]:
    torch._dynamo.config.recompile_limit = 64
    case, changes = {"full": (CASES["odd"], FULL), "lora": (_TWO_ADAPTERS, LORA)}[kind]
    pair = Beside(mesh, case, options=_OPTIONS)
    pair.train(2)
    seen = {}
    for name, change in changes.items():
        try:
            seen[name] = _apply(pair, change)
        except Exception as error:
            raise AssertionError(f"change {name!r}") from error
    return seen


@pytest.fixture(scope="module")
def full() -> list[dict[str, Seen]]:
    return run(_all_changes, "full", nodes=2, ranks_per_node=2)


@pytest.fixture(scope="module")
def lora() -> list[dict[str, Seen]]:
    return run(_all_changes, "lora", nodes=2, ranks_per_node=2)


def _check(ranks: Iterable[Seen], *, changes_loss: bool = True) -> None:
    for seen in ranks:
        assert seen.idle_bytes == 0, "a forward without a change uses what is cached"
        assert seen.after == pytest.approx(seen.expected, rel=TOLERANCE)
        if changes_loss:
            assert abs(seen.after - seen.before) > 10 * TOLERANCE * abs(seen.before)
            assert seen.refreshed_bytes > 0
        if seen.expected_bytes is not None:
            assert seen.refreshed_bytes == seen.expected_bytes


@pytest.mark.parametrize("change", FULL)
def test_a_changed_parameter_is_gathered_again(full: list[dict[str, Seen]], change: str) -> None:
    _check(seen[change] for seen in full)


_SAME_LOSS = {"merge and unmerge"}  # restores the values, except for rounding


@pytest.mark.slow
@pytest.mark.parametrize("change", LORA)
def test_a_changed_parameter_of_an_adapted_model_is_gathered_again(
    lora: list[dict[str, Seen]], change: str
) -> None:
    _check((seen[change] for seen in lora), changes_loss=change not in _SAME_LOSS)
    if change in _SAME_LOSS:
        assert all(seen[change].refreshed_bytes > 0 for seen in lora)
