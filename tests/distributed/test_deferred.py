"""Models built on meta: nothing runs without values, and materialize gives those of an unsharded build."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.errors import FcdpError
from fcdp_compile.sharding import state_of
from fcdp_compile.torch_compat import DispatchMode, FakeTensor, storage_id
from tests.distributed.beside import Beside, whole
from tests.distributed.jobs import WORKS, Job, message_of, run_jobs
from tests.distributed.models import CASES, Floats, Odd, batch, gpt2, llama

Make = Callable[[], nn.Module]


class OwnOdd(Odd):
    """Odd with an initialisation of its own, which its constructor calls as modules of torch do."""

    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 1.5)


class TiedHead(nn.Module):
    """A head tied to the embedding, a norm with buffers, and a buffer that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 7, padding_idx=3)
        self.norm = nn.BatchNorm1d(7)
        self.attention = nn.MultiheadAttention(7, 1)
        self.head = nn.Linear(7, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.weight.note = "kept"  # type: ignore[attr-defined]  # as frameworks leave marks

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids).transpose(1, 2)
        logits: Tensor = self.head(self.norm(hidden).transpose(1, 2))
        return logits


def _adapted(base: Make, config: peft.PeftConfig) -> nn.Module:
    adapted: nn.Module = peft.get_peft_model(base(), config)  # type: ignore[arg-type]
    return adapted


def _lora(**more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **more)


SAME: dict[str, Make] = {
    "odd": OwnOdd,
    "tied": TiedHead,
    "llama": llama,
    "lora": partial(_adapted, llama, _lora()),
    "dora": partial(_adapted, llama, _lora(use_dora=True)),
    "lora as linear": partial(_adapted, llama, _lora(init_lora_weights=False)),
    "a trained head": partial(_adapted, llama, _lora(modules_to_save=["lm_head"])),
    "ia3": partial(
        _adapted,
        llama,
        peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[]),
    ),
}
"""Models whose values after materialize are an unsharded build's, bit for bit."""


def _built(make: Make, mesh: DeviceMesh | None, seed: int = 0, **options: Any) -> nn.Module:
    with torch.device("meta"):
        model = make()
    model = fcdp_compile.shard(model, mesh, **options)
    torch.manual_seed(seed)
    fcdp_compile.materialize(model)
    return model


def _expect(model: nn.Module, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters())
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    for name, parameter in found.items():
        assert torch.equal(whole(parameter), expected[name].detach()), name
        assert parameter.requires_grad == expected[name].requires_grad, name
    buffers = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
        assert buffer.dtype == buffers[name].dtype
    assert set(model.state_dict()) == set(plain.state_dict())  # what is persistent, too


# --- without ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAME)
def test_values_are_those_of_an_unsharded_build(name: str) -> None:
    torch.manual_seed(0)
    plain = SAME[name]()
    after = torch.get_rng_state()
    model = _built(SAME[name], None)
    _expect(model, plain)
    if name != "ia3":  # whose constructor draws what it then overwrites
        assert torch.equal(torch.get_rng_state(), after)


def test_marks_and_ties_stay() -> None:
    model: Any = _built(TiedHead, None)
    assert model.head._parameters["weight"] is model.embedding._parameters["weight"]
    assert model.embedding.weight.note == "kept"
    assert not model.embedding.weight[3].any()


def test_all_without_an_initialisation_are_named_and_nothing_changes() -> None:
    with torch.device("meta"):
        model = fcdp_compile.shard(nn.Sequential(nn.Linear(2, 2), Odd(), Floats()))
    state = torch.get_rng_state()
    found = message_of(FcdpError, lambda: fcdp_compile.materialize(model))
    assert "1.scale (Odd), 2.mean (Floats) are without an initialisation" in found
    assert torch.equal(torch.get_rng_state(), state)
    assert "0.weight" in message_of(FcdpError, lambda: model(torch.ones(2, 2)))


class _Half(nn.Linear):
    """Sets half of its weight."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight[:1])
        nn.init.zeros_(self.bias)


class _Failing(nn.Linear):
    """Fails when there is memory to initialise."""

    is_built = False

    def reset_parameters(self) -> None:
        if self.is_built:
            raise ArithmeticError("no luck")


class _Attribute(nn.Linear):
    """Has a tensor that is neither parameter nor buffer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.table = torch.ones(3)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (partial(_Half, 2, 2), "weight is not set, or not everywhere"),
        (partial(_Attribute, 2, 2), "table is on meta and neither a parameter nor a buffer"),
        (
            partial(_adapted, llama, _lora(init_lora_weights="olora")),
            "starts as init_lora_weights='olora' says, which is made from the values",
        ),
    ],
)
def test_what_cannot_be_materialized(make: Make, what: str) -> None:
    if "olora" in what:
        # PEFT itself cannot take apart a matrix without values.
        with torch.device("meta"):
            model = _adapted(llama, _lora())
        model.peft_config["default"].init_lora_weights = "olora"
    else:
        with torch.device("meta"):
            model = make()
    model = fcdp_compile.shard(model)
    assert what in message_of(FcdpError, lambda: fcdp_compile.materialize(model))
    assert state_of(model).awaited


class _SetsBelow(nn.Module):
    """Sets another module's values in a way that cannot be followed without values."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.scale, self.how = nn.Linear(3, 3), nn.Parameter(torch.empty(1)), how
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        weight = self.inner.weight
        if self.how == "by .data":
            wide = nn.init.trunc_normal_(weight.data.to(torch.float64), std=7.0)
            weight.data = wide.to(weight.dtype)
        elif self.scale.is_meta or self.scale.item() == 1:
            nn.init.zeros_(weight)


@pytest.mark.parametrize("how", ["by .data", "if a value says so"])
def test_values_of_modules_below_are_set_too(how: str) -> None:
    model = _built(lambda: _SetsBelow(how), None)
    torch.manual_seed(0)
    _expect(model, _SetsBelow(how))


class _SetsBeside(nn.Linear):
    """Sets what is another module's, if a value says so."""

    beside: nn.Linear

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.ones_(self.bias)
        if not self.bias.is_meta and self.bias.sum().item() > 0:
            nn.init.zeros_(self.beside.weight)


def test_what_could_not_be_foreseen_is_refused() -> None:
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(2, 2), _SetsBeside(2, 2))
    vars(plain[1])["beside"] = plain[0]
    model = fcdp_compile.shard(plain)
    found = message_of(FcdpError, lambda: fcdp_compile.materialize(model))
    assert "_SetsBeside.reset_parameters of 1 failed: it uses 0.weight of another module" in found
    assert state_of(model).awaited


def test_a_failing_initialisation_is_named() -> None:
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(2, 2), _Failing(2, 2))
    model: Any = fcdp_compile.shard(plain)
    model[1].is_built = True
    state = torch.get_rng_state()
    found = message_of(FcdpError, lambda: fcdp_compile.materialize(model))
    assert "_Failing.reset_parameters of 1 failed: no luck" in found
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model[0]._parameters["weight"]) is nn.Parameter
    assert "0.weight" in message_of(FcdpError, lambda: model(torch.ones(2, 2)))


def test_ignored_parameters_cannot_be_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'0.weight' is among ignored_params and on meta"):
        fcdp_compile.shard(model, ignored_params=[model[0].weight])


def test_what_has_values_keeps_them() -> None:
    with torch.device("meta"):
        head = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    body = nn.BatchNorm1d(3)
    nn.init.constant_(body.running_mean, 5.0)  # type: ignore[arg-type]
    body.weight = head[1].weight  # on meta, in a module that has the rest
    model = nn.Sequential(body, head[0])
    model = fcdp_compile.shard(model)
    fcdp_compile.materialize(model)
    assert bool((body.running_mean == 5.0).all())  # type: ignore[union-attr]
    assert torch.equal(body.weight.detach(), torch.ones(3))
    before = [p.detach().clone() for p in model.parameters()]
    fcdp_compile.materialize(model)  # nothing to do
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a, b.detach())


class TestLoading:
    """load_state_dict gives values to what it loads, of the model or of a part of it."""

    def _pair(self) -> tuple[Any, nn.Module]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        return fcdp_compile.shard(model), nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))

    def test_of_a_module_and_then_the_rest(self) -> None:
        model, plain = self._pair()
        model[0].load_state_dict(plain[0].state_dict())  # type: ignore[index]
        assert {k.partition(":")[2] for k in state_of(model).awaited} == {"1.weight", "1.bias"}
        rest = {k: v for k, v in plain.state_dict().items() if k.startswith("1.")}
        model.load_state_dict(rest, strict=False)
        assert not state_of(model).without_values
        inputs = torch.rand(3, 4)
        assert torch.equal(model(inputs), plain(inputs))

    def test_that_fails_gives_none(self) -> None:
        model, plain = self._pair()
        bad = plain.state_dict() | {"0.weight": torch.zeros(9)}
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(bad)
        assert "m" in next(iter(state_of(model).awaited))
        assert len(state_of(model).without_values.names()) == 7

    def test_writing_by_hand_does_not_count(self) -> None:
        model, _ = self._pair()
        for parameter in model.parameters():
            parameter.data.zero_()
        found = message_of(FcdpError, lambda: model(torch.ones(2, 4)))
        assert "is written to a parameter by hand does not count" in found

    def test_an_optimizer_step_is_refused(self) -> None:
        model, _ = self._pair()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        assert "an optimizer step needs the values of '0.weight'" in message_of(
            FcdpError, optimizer.step
        )
        other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        other.step()


# --- memory ------------------------------------------------------------------------------------------------


class _Live(DispatchMode):
    """Bytes of the storages that ops made and that somebody still holds; the most that there were.

    older: tensors that are not to be counted.
    """

    def __init__(self, older: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._older = {storage_id(tensor) for tensor in older}
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and type(tensor) is not FakeTensor and not tensor.is_meta:
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = storage_id(tensor)
        if storage in self._older:
            return
        if storage not in self._known:
            self.now += tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self.now)
        self._known[storage] = self._known.get(storage, 0) + 1
        weakref.finalize(tensor, self._forget, storage, tensor.untyped_storage().nbytes())

    def _forget(self, storage: int, size_bytes: int) -> None:
        self._known[storage] -= 1
        if not self._known[storage]:
            del self._known[storage]
            self.now -= size_bytes


def _layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(48)], nn.Embedding(2048, 512))


def _memory(mesh: DeviceMesh | None, make: Make = _layers) -> None:
    """Beyond the home shards there is never more than the parameters of the largest module."""
    with torch.device("meta"):
        model = make()
    largest = max(sum(p.nbytes for p in m.parameters(recurse=False)) for m in model.modules())
    whole_bytes = sum(p.nbytes for p in model.parameters())
    model = fcdp_compile.shard(model, mesh)
    live = _Live([record.local() for record in state_of(model).records.values()])
    with live:
        fcdp_compile.materialize(model)
    buffers = sum(b.nbytes for b in model.buffers())
    small = 2**16  # states of generators
    if mesh is not None:
        small += 2**19  # what fingerprints work on at a time, whatever the size
    assert largest <= live.peak <= largest + buffers + small, (live.peak, largest)
    assert live.peak < whole_bytes / 8, "the control: the whole model is much larger"


def test_no_more_memory_than_the_largest_module() -> None:
    _memory(None)


# --- with ranks --------------------------------------------------------------------------------------------


def _same(mesh: DeviceMesh, name: str, **options: Any) -> None:
    torch.manual_seed(7)
    plain = SAME[name]()
    # Every rank stands elsewhere with its random numbers, and does so afterwards.
    with torch.device("meta"):
        model = SAME[name]()
    model = fcdp_compile.shard(model, mesh, **options)
    torch.manual_seed(7 + 100 * dist.get_rank())
    before = torch.get_rng_state()
    fcdp_compile.materialize(model)
    _expect(model, plain)
    if dist.get_rank():
        assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    model2 = _built(SAME[name], mesh, 7, **options)
    states = [torch.empty_like(before) for _ in range(dist.get_world_size())]
    dist.all_gather(states, torch.get_rng_state())
    assert all(torch.equal(s, states[0]) for s in states), "all stand where rank 0 does"
    _expect(model2, plain)


def _train(mesh: DeviceMesh) -> None:
    """A materialised model trains as one built with its values does, and nothing ran before."""
    torch._dynamo.reset()
    case = CASES["llama"]
    with torch.device("meta"):
        model = case.model()
    model = fcdp_compile.shard(model, mesh)
    net = torch.compile(model, backend="fcdp", options={"compute": "eager"})
    ids = batch(case, step=0, rank=dist.get_rank())
    for call in (net, model, lambda **kw: model.model(kw["input_ids"])):
        found = message_of(FcdpError, lambda call=call: call(input_ids=ids))
        assert "a forward needs the values of 'model.embed_tokens.weight'" in found, found
    optimizer = torch.optim.AdamW(model.parameters())
    assert "an optimizer step needs" in message_of(FcdpError, optimizer.step)
    torch.manual_seed(0)
    fcdp_compile.materialize(model)
    pair = Beside(mesh, case, options={"compute": "eager"})  # the same seed
    for step in range(2):
        mine, other = (case.loss(n, pair.data(step)) for n in (net, pair.net))
        assert mine.item() == other.item()
        (mine * 1.0).backward()
        other.backward()
        for a, b in zip(model.parameters(), pair.model.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(whole(a.grad), whole(b.grad))
        model.zero_grad()
        pair.model.zero_grad()


def _loaded(mesh: DeviceMesh) -> None:
    """DCP's tools give values; what they leave out is still awaited, on every rank alike."""
    torch.manual_seed(3)
    plain = llama()
    with torch.device("meta"):
        model = llama()
    model = fcdp_compile.shard(model, mesh)
    full = {k: v.clone() for k, v in plain.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
    state = state_of(model)
    assert not state.awaited
    assert state.awaited_buffers, "rotary frequencies are in no state dict"
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert "inv_freq" in message_of(FcdpError, lambda: model(input_ids=ids))
    fcdp_compile.materialize(model)
    _expect(model, plain)


def _loaded_on_one(mesh: DeviceMesh) -> None:
    """Values on one rank alone: every rank says so, and nobody waits."""
    with torch.device("meta"):
        model = nn.Linear(6, 6)
    model = fcdp_compile.shard(model, mesh)
    if dist.get_rank() == 1:
        model.load_state_dict({k: v.detach() for k, v in model.state_dict().items()})
    found = message_of(FcdpError, lambda: model(torch.ones(2, 6)))
    assert "load the same on every rank" in found or "needs the values of 'weight'" in found
    found = message_of(FcdpError, lambda: fcdp_compile.materialize(model))
    assert "load the same on every rank before fcdp_compile.materialize" in found


class _Pythons(nn.Linear):
    """Draws from another generator than torch's."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, random.random())
        nn.init.zeros_(self.bias)


class _FailsOnRank1(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if dist.is_initialized() and dist.get_rank() == 1 and not self.weight.is_meta:
            raise ArithmeticError("no luck")


def _differing(mesh: DeviceMesh) -> None:
    random.seed(dist.get_rank())
    found = message_of(FcdpError, lambda: _built(partial(_Pythons, 5, 5), mesh))
    assert "ranks have initialised 'weight' differently" in found, found


def _failing_rank(mesh: DeviceMesh) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), _FailsOnRank1(3, 3), nn.Linear(3, 3))

    found = message_of(FcdpError, lambda: _built(make, mesh))
    assert "no luck" in found, found


def _different_on_meta(mesh: DeviceMesh) -> None:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = nn.Linear(3, 3)
    found = message_of(ValueError, lambda: fcdp_compile.shard(model, mesh))
    assert "on meta" in found, found


_JOBS: dict[str, Job] = {
    **{name: partial(_same, name=name) for name in ("odd", "tied", "dora", "a trained head")},
    "llama, param_dtype": partial(_same, name="llama", param_dtype=torch.bfloat16),
    **{f"llama, {s}": partial(_same, name="llama", strategy=s) for s in ("ddp", "zero2", "mics")},
    "train": _train,
    "memory": _memory,
    "loaded": _loaded,
    "loaded on one rank": _loaded_on_one,
    "differing": _differing,
    "failing rank": _failing_rank,
    "different on meta": _different_on_meta,
}


@pytest.fixture(scope="module")
def verdicts() -> list[dict[str, str]]:
    return run_jobs(_JOBS, nodes=2, ranks_per_node=2)


@pytest.mark.distributed
@pytest.mark.parametrize("job", _JOBS)
def test_on_ranks(verdicts: list[dict[str, str]], job: str) -> None:
    assert [v[job] for v in verdicts] == [WORKS] * 4


@pytest.mark.distributed
def test_on_three_ranks() -> None:
    jobs: dict[str, Job] = {n: partial(_same, name=n) for n in ("odd", "tied", "lora")}
    for verdict in run_jobs(jobs, nodes=1, ranks_per_node=3):
        assert verdict == dict.fromkeys(jobs, WORKS)


def test_gpt2_is_initialised_as_its_config_says() -> None:
    """Its constructor draws on its own, so other values; of the same distributions."""
    torch.manual_seed(0)
    plain = gpt2()
    model = _built(gpt2, None)
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        a, b = mine.detach(), other.detach()
        if b.std() == 0:
            assert torch.equal(a, b), name
        else:
            assert abs(a.std() / b.std() - 1) < 0.1, name
