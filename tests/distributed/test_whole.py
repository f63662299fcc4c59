"""Temporarily whole parameters: generation, evaluation, surgery, merging, and writes that must last."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import FcdpError
from fcdp_compile.plan import Kind
from tests.distributed.beside import Beside, assert_close, sgd, whole
from tests.distributed.jobs import WORKS, Job, asked, message_of, rows, run_jobs
from tests.distributed.models import CASES, batch, llama, with_lora

EAGER = {"compute": "eager"}


def _homes(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def _unchanged(model: nn.Module, homes: list[nn.Parameter]) -> None:
    now = list(model.parameters())
    assert len(now) == len(homes)
    assert all(a is b for a, b in zip(now, homes, strict=True))
    assert not state_of(model).whole


def _inside(mesh: DeviceMesh | None, case: str = "odd", **options: Any) -> None:
    """Values, ties, names and forwards equal the plain model's; afterwards training goes on."""
    pair = Beside(mesh, CASES[case], options=EAGER, **options)
    pair.train(1)
    homes = _homes(pair.model)
    expected = dict(pair.plain.named_parameters())
    with fcdp_compile.gathered(pair.net):
        before = state_of(pair.model).validity.generations.of(state_of(pair.model).records)
        found = dict(pair.model.named_parameters())
        assert list(found) == list(expected)
        for name, parameter in found.items():
            assert type(parameter) is nn.Parameter
            assert not parameter.requires_grad
            assert_close(parameter.detach(), expected[name].detach(), name)
        for net in (pair.net, pair.model):
            loss = pair.case.loss(net, pair.data(5))
            assert_close(loss.item(), pair.case.loss(pair.plain, pair.data(5)).item(), "loss")
    _unchanged(pair.model, homes)
    assert state_of(pair.model).validity.generations.of(state_of(pair.model).records) == before
    pair.train(2)
    pair.compare_parameters()


def _next_forward(mesh: DeviceMesh) -> None:
    """What the block has gathered after a step between nodes, the next forward does not gather again."""
    pair = Beside(mesh, CASES["llama"], options=EAGER)
    pair.train(2)
    found = state_of(pair.model).counters.sent
    before = found[Kind.INTER_ALL_GATHER.value]
    with fcdp_compile.gathered(pair.model):
        within = found[Kind.INTER_ALL_GATHER.value]
    pair.train(1)
    assert before < within == found[Kind.INTER_ALL_GATHER.value]
    pair.compare_parameters()


def _generate(mesh: DeviceMesh) -> None:
    """Ranks generate different lengths, with a cache of keys and values, and wait for no other rank."""
    torch.manual_seed(0)
    plain: Any = llama()
    torch.manual_seed(0)
    model: Any = fcdp_compile.shard(llama(), mesh)
    net: Any = torch.compile(model, backend="fcdp", options=EAGER)
    rank = dist.get_rank()
    ids = batch(CASES["llama"], step=0, rank=rank, size=1, length=3 + rank)
    options = {"max_new_tokens": 2 + 3 * rank, "do_sample": False, "pad_token_id": 0}
    options["eos_token_id"] = None
    for one in (model, net):
        with torch.no_grad(), fcdp_compile.gathered(model):
            sent = dict(state_of(model).counters.sent)
            found = one.generate(ids, **options)
            if rank == 0:
                one.generate(ids, **options)  # once more, alone
            assert state_of(model).counters.sent == sent, "nothing was communicated"
        assert torch.equal(found, plain.generate(ids, **options))


def _some(mesh: DeviceMesh) -> None:
    """Only some modules are whole: the others stay shards, and both work together in a forward."""
    pair = Beside(mesh, CASES["llama"], options=EAGER)
    pair.train(1)
    model: Any = pair.model
    by: list[Any] = ["model.layers.*.mlp", [model.model.layers[0].mlp, "model.layers.1.mlp"]]
    for modules in by:
        with fcdp_compile.gathered(model, modules):
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor) != (".mlp." in name), name
            loss = pair.case.loss(pair.net, pair.data(5))
            assert_close(loss.item(), pair.case.loss(pair.plain, pair.data(5)).item(), "loss")
            optimizer = sgd(model.model.embed_tokens.parameters())
            loss.backward()
            optimizer.step()  # the parameters of other modules may be stepped
            assert "while it is whole" in message_of(FcdpError, pair.optimizer.step)
            optimizer.zero_grad()
            pair.plain.model.embed_tokens.weight.data.copy_(  # type: ignore[operator, union-attr]
                whole(model.model.embed_tokens.weight)
            )
    pair.model.zero_grad()
    pair.train(1)


def _writeback(mesh: DeviceMesh | None, **options: Any) -> None:
    """Writes last, and only copies of written parameters become stale."""
    pair = Beside(mesh, CASES["odd"], options=EAGER, **options)
    pair.train(1)
    homes = _homes(pair.model)
    state = state_of(pair.model)
    of = {r.spec.name: key for key, r in state.records.items()}
    with fcdp_compile.gathered(pair.model, writeback=True):
        before = {name: state.validity.generations.of([key]) for name, key in of.items()}
        for model in pair.both:
            with torch.no_grad():
                model.first.weight.mul_(0.5)  # type: ignore[operator, union-attr]
                model.norm.bias.data = torch.full((7,), 0.25)  # type: ignore[union-attr]
                model.scale.fill_(2.0)  # type: ignore[operator, union-attr]
                model.second.bias.mul_(1.0)  # type: ignore[operator, union-attr]
    _unchanged(pair.model, homes)
    changed = {
        name for name, key in of.items() if state.validity.generations.of([key]) != before[name]
    }
    assert changed == {"first.weight", "norm.bias", "scale"}
    pair.compare_parameters()
    pair.train(2)
    pair.compare_parameters()


def _frozen(mesh: DeviceMesh) -> None:
    """Frozen parameters, cached and released, are gathered correctly, and refreshed after writes."""
    case = CASES["llama-lora"]
    pair = Beside(mesh, case, options=EAGER)
    pair.train(2)
    with fcdp_compile.gathered(pair.model, writeback=True):
        for model in pair.both:
            for name, parameter in model.named_parameters():
                if "base_layer" in name:
                    parameter.data.mul_(0.9)
    pair.train(2)
    pair.compare_parameters()


def _merged(mesh: DeviceMesh) -> None:
    """PEFT merges adapters in the block; the merged model cannot train, but computes the same."""

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        return with_lora(llama(), "q_proj", "v_proj")

    plain: Any = adapted()
    model: Any = fcdp_compile.shard(adapted(), mesh)
    ids = batch(CASES["llama"], step=0, rank=dist.get_rank())
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert torch.allclose(expected, plain(input_ids=ids).logits, atol=1e-5)
        with fcdp_compile.gathered(model, writeback=True):
            model.merge_adapter()
        plain.merge_adapter()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            # Products of matrices at other addresses may be rounded differently.
            torch.testing.assert_close(whole(mine), other)
        assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-5)
        with fcdp_compile.gathered(model, writeback=True):
            model.unmerge_adapter()
        assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-5)


def _raises(model: nn.Module, act: Callable[[], None], what: str, **options: Any) -> None:
    homes = _homes(model)
    values = [whole(p).clone() for p in homes]

    def block() -> None:
        with fcdp_compile.gathered(model, **options):
            act()

    found = message_of(FcdpError, block)
    assert what in found, found
    _unchanged(model, homes)
    for value, home in zip(values, homes, strict=True):
        assert torch.equal(value, whole(home))


def _trouble(mesh: DeviceMesh | None) -> None:
    torch.manual_seed(0)
    model: Any = fcdp_compile.shard(CASES["odd"].model(), mesh)
    rank = dist.get_rank() if mesh is not None else 0

    def write(value: float = 3.0) -> None:
        model.first.bias.data.fill_(value)

    def replace(tensor: Tensor) -> None:
        model.first.weight = nn.Parameter(tensor)

    def removed() -> None:
        del model.first.bias

    def trained() -> None:
        model.first.bias.requires_grad_(True)
        CASES["odd"].loss(model, batch(CASES["odd"], step=0, rank=rank)).backward()

    _raises(model, write, "'first.bias' was changed within fcdp_compile.gathered without writeback")
    _raises(model, partial(replace, torch.zeros(2)), "became torch.float32 (2,)", writeback=True)
    half = torch.zeros(13, 7, dtype=torch.float16)
    _raises(model, partial(replace, half), "became torch.float16 (13, 7)", writeback=True)
    _raises(model, removed, "'first.bias' was removed within", writeback=True)
    _raises(model, trained, "'first.bias' got a gradient within", writeback=True)
    if mesh is not None:
        differently = partial(write, float(rank))
        what = "ranks have written different values to parameter 'first.bias'"
        _raises(model, differently, what, writeback=True)
        _raises(
            model,
            lambda: write() if rank == 1 else None,
            "without writeback, so no change was kept",
        )
        _raises(model, lambda: None, "ranks 0 and 1 gather different things", writeback=rank == 1)

        def one_fails() -> None:
            if rank == 1:
                raise FcdpError("only here")

        _raises(model, one_fails, "only here")

    def fails() -> None:
        write()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), fcdp_compile.gathered(model, writeback=True):
        fails()
    assert not bool((whole(model._parameters["scale"]) != 1.5).any())
    assert bool((whole(model.first._parameters["bias"]) != 3.0).all()), "what failed writes nothing"
    found = message_of(ValueError, lambda: fcdp_compile.gathered(model, "frist").__enter__())
    assert (
        "modules names 'frist', but no module of the model matches it; did you mean 'first'"
        in found
    )
    found = message_of(ValueError, lambda: fcdp_compile.gathered(model, nn.ReLU()).__enter__())
    assert "ReLU that is not in the model" in found
    found = message_of(TypeError, lambda: fcdp_compile.gathered(model, 3).__enter__())  # type: ignore[arg-type]
    assert found != "nothing was raised"
    with fcdp_compile.gathered(model, "first", writeback=True):
        with fcdp_compile.gathered(model):
            assert not isinstance(model.norm.weight, DTensor)
        assert isinstance(model.norm._parameters["weight"], DTensor) == (mesh is not None)
        with fcdp_compile.gathered(model, "first", writeback=True):
            write(7.0)
        assert bool((model.first.bias == 7.0).all())
    assert bool((whole(model.first._parameters["bias"]) == 7.0).all())
    with fcdp_compile.gathered(model):
        nested = fcdp_compile.gathered(model, writeback=True)
        assert "an outer block of fcdp_compile.gathered" in message_of(ValueError, nested.__enter__)
    with torch.device("meta"):
        linear = nn.Linear(2, 2)
    bare = fcdp_compile.shard(linear, mesh)
    block = fcdp_compile.gathered(bare)
    assert "fcdp_compile.gathered needs the values of 'weight'" in message_of(
        FcdpError, block.__enter__
    )


def test_in_a_single_process() -> None:
    _inside(None)
    _inside(None, param_dtype=torch.float32)
    _writeback(None)
    _trouble(None)


def _param_dtype(mesh: DeviceMesh) -> None:
    """In a forward the parameters have the gather's dtype, elsewhere the home shards' dtype."""
    torch.manual_seed(0)
    model: Any = fcdp_compile.shard(CASES["odd"].model(), mesh, param_dtype=torch.bfloat16)
    ids = batch(CASES["odd"], step=0, rank=dist.get_rank())
    with torch.no_grad():
        expected = model(ids)
        with fcdp_compile.gathered(model):
            assert model.first.weight.dtype == torch.float32
            torch.testing.assert_close(model(ids), expected)


_JOBS: dict[str, Job] = {
    "inside": _inside,
    "inside, tied": partial(_inside, case="gpt2"),
    "inside, graph breaks": partial(_inside, case="broken"),
    "the next forward": _next_forward,
    "generate": _generate,
    "some modules": _some,
    "writeback": _writeback,
    **{f"writeback, {s}": partial(_writeback, strategy=s) for s in ("ddp", "mics")},
    "frozen": _frozen,
    "merged": _merged,
    "trouble": _trouble,
    "param_dtype": _param_dtype,
}

_SLOW = (
    "the next forward",
    "some modules",
    "frozen",
    "inside, tied",
    "inside, graph breaks",
    "generate",
    "writeback, ddp",
    "writeback, mics",
    "merged",
    "param_dtype",
)


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_jobs(asked(request, _JOBS), nodes=2, ranks_per_node=2)


@pytest.mark.distributed
@pytest.mark.parametrize("job", rows(_JOBS, slow=_SLOW))
def test_on_ranks(verdicts: list[dict[str, str]], job: str) -> None:
    assert [v[job] for v in verdicts] == [WORKS] * 4


@pytest.mark.slow
@pytest.mark.distributed
def test_on_three_ranks() -> None:
    jobs: dict[str, Job] = {"inside": _inside, "writeback": _writeback}
    for verdict in run_jobs(jobs, nodes=1, ranks_per_node=3):
        assert verdict == dict.fromkeys(jobs, WORKS)
