"""When `shard(…, offload_params="auto")` offloads."""

from __future__ import annotations

import pytest
import torch

from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.spec import Home, on_hosts, param_spec
from fcdp_compile.core.sharding.refusals import check_choices
from fcdp_compile.core.sharding.shard import fills
from fcdp_compile.strategy import Strategy

MESH = Home(nodes=2, ranks_per_node=2, node=0, place=0)


def _spec(strategy: str) -> ParamSpec:
    return param_spec(
        "p",
        "p",
        shape=(8, 4),
        dtype=torch.float32,
        strategy=Strategy.parse(strategy),
        mesh=MESH,
    )


@pytest.mark.parametrize(
    ("strategy", "is_frozen", "bytes_of_8_elements"),
    [("fcdp", False, 8 * 16), ("fcdp", True, 0), ("zero3", True, 8 * 4), ("mics", False, 16 * 16)],
)
def test_what_fills_a_gpu(strategy: str, is_frozen: bool, bytes_of_8_elements: int) -> None:
    """A home shard with its gradient and moments; a frozen one only where it stays on the GPU."""
    specs = [(_spec(strategy), not is_frozen)]
    limit = -(-bytes_of_8_elements * 4 // 3)
    assert fills(max(limit - 1, 0), specs) == (limit > 0)
    assert not fills(limit, specs)
    assert not fills(None, specs)


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_what_is_no_choice(value: object) -> None:
    with pytest.raises(ValueError, match="offload_params must be True, False or 'auto', not"):
        check_choices(value, "inline")


def test_strategies_without_home_shards_stay() -> None:
    given = {name: Strategy.parse(name) for name in ("ddp", "mics", "fcdp")}
    found = on_hosts(given, MESH, where_possible=True)
    assert {name: s.offloads for name, s in found.items()} == {
        "ddp": False,
        "mics": True,
        "fcdp": True,
    }
    with pytest.raises(ValueError, match="keeps all parameters on every rank"):
        on_hosts(given, MESH)


@pytest.mark.parametrize("value", [True, None, "apart"])
def test_what_is_no_choice_of_layers(value: object) -> None:
    with pytest.raises(ValueError, match="layers must be 'auto', 'inline' or 'shared', not"):
        check_choices(False, value)
