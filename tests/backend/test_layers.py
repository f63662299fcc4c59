"""Equal layers are traced once, and whatever differs between layers is noticed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.torch_compat.compilers import own_recompiles
from tests.marks import quick

LAYERS, WIDTH = 5, 6


class Inner(nn.Module):
    """A part of a layer, with what a layer may have beside parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act: nn.Module = nn.Tanh()
        self.drop = nn.Dropout(0.5)
        self.factor = 1.0
        self.table = [1.0, 2.0]
        self.offset = torch.zeros(WIDTH)  # neither a parameter nor a buffer
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        # Dropout that draws no numbers: they are not those of the plain model.
        dropped = x * 0.5 if self.drop.training else x
        result: Tensor = self.act(self.linear(dropped)) * self.factor + self.shift
        return result + self.table[1] + self.offset.sum()


class Layer(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Inner(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        if cache is not None:
            cache.seen += 1
        result: Tensor = x + self.out(self.inner(x))
        return result


class Stack(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, cache=cache)
        result: Tensor = self.head(x)
        return result


class Pair:
    """A sharded, compiled model and a plain one with the same values."""

    def __init__(
        self,
        *changes: Change,
        cls: type[nn.Module] = Stack,
        layers: str = "shared",
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        self.plain = cls()
        self.model = copy.deepcopy(self.plain)
        for change in changes:
            change(self.plain)
            change(self.model)
        self.model = fcdp_compile.shard(self.model, layers=layers)
        settings = {"compute": "eager"}
        self.net = torch.compile(self.model, backend="fcdp", options=settings, **options)

    def compare(self, steps: int = 2, note: str = "", **more: Any) -> None:
        ids = torch.arange(8).reshape(2, 4) % 7
        for _ in range(steps):
            for model, net in ((self.model, self.net), (self.plain, self.plain)):
                model.zero_grad()
                net(ids, **more).tanh().mean().backward()
                with torch.no_grad():
                    for p in model.parameters():
                        if p.grad is not None:
                            p -= 0.01 * p.grad
        for (name, mine), theirs in zip(
            self.model.named_parameters(), self.plain.parameters(), strict=True
        ):
            torch.testing.assert_close(mine, theirs, msg=f"{name} {note}")

    @property
    def graphs(self) -> int:
        """How many graphs Dynamo has traced."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


Change = Callable[[nn.Module], Any]


def test_equal_layers_share_a_trace() -> None:
    pair = Pair()
    pair.compare()
    assert pair.graphs == 3  # the embedding, a layer, the head
    assert len(state_of(pair.model).plans) == LAYERS + 2
    assert not fcdp_compile.explain(pair.model).graph_breaks
    assert not fcdp_compile.explain(pair.model).uncovered


class Scored(nn.Module):
    """A stack within a module that computes with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.score = Stack(), nn.Linear(7, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.score(self.body(ids).tanh()).log_softmax(-1)


def test_the_code_around_a_stack_is_compiled() -> None:
    pair = Pair(cls=Scored)
    pair.compare()
    assert pair.graphs == 4  # those of the stack, and all that comes after it
    assert len(state_of(pair.model).plans) == LAYERS + 3
    assert not fcdp_compile.explain(pair.model).graph_breaks


_TRACED: list[None] = []


@torch.compiler.assume_constant_result
def _note_trace() -> None:
    _TRACED.append(None)


def _decorated(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return call


class Decorated(Stack):
    """A stack whose forward is many frames, and does more than to call its layers."""

    @_decorated
    @_decorated
    @_decorated
    def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
        x = self.embedding(ids)
        _note_trace()
        for layer in self.layers:
            x = layer(x + ids.unsqueeze(-1).tanh(), cache=cache)
        result: Tensor = self.head(x)
        return result


def test_the_frames_around_layers_are_not_traced_in_full() -> None:
    _TRACED.clear()
    pair = Pair(cls=Decorated)
    pair.compare(steps=1)
    # By the plain model, to find the first layer, and twice after the embedding; not in each frame.
    assert len(_TRACED) == 4


def test_one_graph_for_who_asks_for_it() -> None:
    pair = Pair(fullgraph=True)
    pair.compare(steps=1)
    assert pair.graphs == len(state_of(pair.model).plans) == 1


def test_another_backend_gets_one_graph() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = fcdp_compile.shard(Stack(), layers="shared")
    ids = torch.arange(4).reshape(1, 4)
    found = torch.compile(model, backend="eager")(ids)
    torch.testing.assert_close(found, model(ids))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Cache:
    """What a layer may change."""

    def __init__(self) -> None:
        self.seen = 0


def test_layers_that_share_an_object_are_in_one_graph(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    cache = Cache()
    pair.compare(steps=1, cache=cache)
    assert cache.seen == 2 * LAYERS
    assert pair.graphs == 1
    (warned,) = [r.message for r in caplog.records if "one by one" in r.message]
    assert warned == (
        "equal layers are traced one by one, and the model starts slowly: Layer is given an object that may "
        "differ between layers, such as a cache of keys and values; make a Transformers model with "
        "use_cache=False"
    )


@pytest.mark.parametrize(
    ("count", "width", "are_shared"), [(8, 4096, True), (7, 4096, False), (8, 4095, False)]
)
def test_by_default_many_large_layers_share_a_trace(
    count: int, width: int, *, are_shared: bool
) -> None:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    model = fcdp_compile.shard(nn.Sequential(*layers))
    assert {hasattr(layer, "_fcdp_stands_alone") for layer in model} == {are_shared}


def test_compiled_in_place_as_the_trainers_do() -> None:
    pair = Pair()
    pair.model.compile(backend="fcdp", options={"compute": "eager"}, **own_recompiles(9))
    pair.net = pair.model
    pair.compare()
    assert pair.graphs == 3


def _other_class(model: nn.Module) -> None:
    torch.manual_seed(1)

    class Other(Layer):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            return 2 * super().forward(x)

    model.layers[3] = Other()


def _wider(model: nn.Module) -> None:
    torch.manual_seed(1)
    inner: Any = model.layers[1].inner
    inner.linear = nn.Linear(WIDTH, 2 * WIDTH)
    inner.shift = torch.zeros(2 * WIDTH)
    model.layers[1].out = nn.Linear(2 * WIDTH, WIDTH)


def _frozen(model: nn.Module) -> None:
    model.layers[2].out.weight.requires_grad_(False)


def _flag(model: nn.Module) -> None:
    model.layers[3].inner.factor = 3.0


def _element(model: nn.Module) -> None:
    model.layers[1].inner.table[1] = 5.0


def _tensor(model: nn.Module) -> None:
    model.layers[2].inner.offset = torch.ones(2)


def _hook(model: nn.Module) -> None:
    model.layers[2].register_forward_hook(lambda module, args, result: result * 2)


def _hook_below(model: nn.Module) -> None:
    model.layers[4].inner.linear.register_forward_pre_hook(lambda module, args: (args[0] * 3,))


def _forward(model: nn.Module) -> None:
    layer: Any = model.layers[1]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs) * 2


def _activation(model: nn.Module) -> None:
    model.layers[1].inner.act = nn.ReLU()


def _evaluated(model: nn.Module) -> None:
    model.layers[3].eval()


def _buffer(model: nn.Module) -> None:
    model.layers[2].inner.shift.add_(1.0)


def _other_buffer(model: nn.Module) -> None:
    model.layers[4].inner.shift = torch.full((1,), 2.0)


ALWAYS = [
    _flag,
    _element,
    _tensor,
    _hook,
    _hook_below,
    _forward,
    _activation,
    _evaluated,
    _buffer,
    _other_buffer,
]


@pytest.mark.parametrize(
    "change", quick([_other_class, _wider, _frozen, *ALWAYS], _frozen, _hook_below)
)
def test_a_layer_that_differs_computes_its_own(change: Change) -> None:
    pair = Pair(change)
    pair.compare(steps=1)
    assert len(state_of(pair.model).plans) == LAYERS + 2


class Reached(Stack):
    """Modules that are reached in other ways than by a call of a layer, or of a module of the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: Layer() for name in "ab"})

    def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
        x = self.embedding(ids)
        for i, layer in enumerate(self.layers):
            x = layer.forward(x) if i % 2 else layer(x)
        for layer in self.layers[:2]:
            x = x + layer.inner(x)
        result: Tensor = self.head(sum(head(x) for head in self.heads.values()))
        return result


def _hooks(model: nn.Module) -> None:
    model.layers[2].register_forward_hook(lambda module, args, result: result * 2)
    for linear in (
        model.layers[3].inner.linear,
        model.layers[0].inner.linear,
        model.heads["b"].out,
    ):
        linear.register_forward_pre_hook(lambda module, args: (args[0] * 3,))


@pytest.mark.parametrize(
    ("changed", "layers"),
    quick(
        list(product(["before", "after"], ["shared", "inline"])),
        ("before", "shared"),
        ("after", "inline"),
    ),
)
def test_hooks_are_noticed_however_a_module_is_reached(changed: str, layers: str) -> None:
    pair = Pair(*([_hooks] if changed == "before" else []), cls=Reached, layers=layers)
    pair.compare(steps=1)
    for model in (pair.model, pair.plain) if changed == "after" else ():
        _hooks(model)
    pair.compare(steps=1)


@pytest.mark.parametrize("changed", quick(["before", "after"], "before"))
def test_hooks_of_modules_that_the_user_compiles(changed: str) -> None:
    pair = Pair(*([_hook, _hook_below] if changed == "before" else []))
    for module in (*pair.model.layers, pair.model.head):
        module.compile(backend="fcdp", options={"compute": "eager"})
    pair.net = pair.model
    pair.compare(steps=1)
    for change in [] if changed == "before" else [_hook, _hook_below]:
        change(pair.model)
        change(pair.plain)
    pair.compare(steps=1)


def test_what_changes_in_one_layer_is_noticed() -> None:
    pair = Pair()
    pair.compare(steps=1)
    for change in ALWAYS:
        change(pair.model)
        change(pair.plain)
        pair.compare(steps=1, note=change.__name__)
    assert len(state_of(pair.model).plans) > LAYERS + 2
