"""Quantised weights in one process: apart and together again, refused, restored, and never saved whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fcdp_compile
from fcdp_compile.errors import ArgumentError, UnshardedParameterError
from fcdp_compile.models.pretrained.load import quantised_in_pieces
from fcdp_compile.models.quantised.weight import QuantisedWeight, take_apart, unfolded
from tests.device.choice import seeded
from tests.marks import quick
from tests.quantised.layers import LAYERS, WIDTH, adapted, four_bit, loss_of

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytest.importorskip("torchao", reason="torchao is not installed")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()  # its limit of compilations counts those of all models of one class


@pytest.mark.parametrize("kind", LAYERS)
def test_a_sharded_layer_computes_what_the_librarys_does(kind: str) -> None:
    plain, model = adapted(kind), adapted(kind)
    fcdp_compile.shard(model)
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".weight." in n)
    for module in (model, torch.compile(model, backend="fcdp", fullgraph=True)):
        expected, loss = loss_of(plain, 0), loss_of(module, 0)
        torch.testing.assert_close(loss, expected, rtol=0, atol=0)
        for of_plain, of_model in zip(
            _gradients(plain, expected), _gradients(model, loss), strict=True
        ):
            torch.testing.assert_close(of_model, of_plain, rtol=0, atol=0)


def _gradients(model: nn.Module, loss: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", quick(LAYERS, "nf4-nested"))
def test_the_backward_saves_no_dequantised_weight(kind: str, checkpointed: bool) -> None:
    model = fcdp_compile.shard(adapted(kind, checkpointed=checkpointed))
    net = torch.compile(model, backend="fcdp")
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(net, 0).backward()
    packed = {p.untyped_storage().data_ptr() for p in model.parameters()}
    packed |= {b.untyped_storage().data_ptr() for b in model.buffers()}
    large = [
        t
        for t in saved
        if t.numel() >= WIDTH * WIDTH // 2 and t.untyped_storage().data_ptr() not in packed
    ]
    assert saved, "or nothing was looked at"
    assert not large, [(t.dtype, tuple(t.shape)) for t in large]


def test_training_goes_on_as_if_there_had_been_no_evaluation() -> None:
    """On some CPUs bitsandbytes' own layers write other bytes to their weights in an evaluation."""
    losses = []
    for evaluates in (False, True):
        model = fcdp_compile.shard(adapted("nf4-nested"))
        net = torch.compile(model, backend="fcdp")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(3):
            loss = loss_of(net, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                net.eval()
                with torch.no_grad():
                    loss_of(net, step)
                net.train()
        losses.append(loss.item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
def test_a_model_that_was_evaluated_before_shard_has_its_weights_in_order(kind: str) -> None:
    """The library has rounded its scales to bf16 then, and has exchanged rows and columns of some."""
    plain, model = (adapted(kind)[0].base for _ in range(2))
    model.eval()(torch.zeros(1, WIDTH))
    x = torch.randn(4, WIDTH, generator=seeded(1))
    torch.testing.assert_close(
        fcdp_compile.shard(nn.Sequential(model))(x), plain(x), rtol=0, atol=5e-3
    )


def test_packed_tensors_are_cut_between_blocks_and_float8_is_bytes() -> None:
    layer = four_bit("nf4", nested=True)
    parts = take_apart(layer, "weight")
    assert parts is not None
    assert {n: tuple(t.shape) for n, t in parts.packed.items()} == {
        "packed": (WIDTH * WIDTH // 64, 32),
        "absmax": (WIDTH * WIDTH // 64,),
    }
    float8 = take_apart(LAYERS["torchao-float8"](), "weight")
    assert float8 is not None
    assert QuantisedWeight(float8).get_parameter("qdata").dtype is torch.uint8


def test_bytes_of_another_storage_dtype_and_of_a_shape_with_half_a_block() -> None:
    for shape, storage in (((64, 32), torch.bfloat16), ((10, 10), torch.uint8)):
        layer = bitsandbytes.nn.Linear4bit(
            *reversed(shape), quant_type="nf4", compute_dtype=torch.float32, quant_storage=storage
        )
        layer = layer.requires_grad_(False).to("cpu")
        x = torch.randn(3, shape[1])
        expected = layer(x)
        model = fcdp_compile.shard(nn.Sequential(layer))
        assert torch.equal(model(x), expected)
        assert torch.equal(torch.compile(model, backend="fcdp")(x), expected)


@settings(deadline=None, max_examples=20)
@given(cut=st.integers(0, 41), nested=st.booleans())
def test_blocks_that_are_quantised_alone_are_the_librarys(cut: int, nested: bool) -> None:
    values = torch.randn(40, 64, generator=seeded(cut))
    packed, state = bitsandbytes.functional.quantize_4bit(
        values, quant_type="nf4", compress_statistics=nested
    )
    layer = bitsandbytes.nn.Linear4bit(
        64, 40, bias=False, quant_type="nf4", compress_statistics=nested, device="meta"
    )
    parts = take_apart(layer.requires_grad_(False), "weight")
    assert parts is not None
    quantiser = parts.recipe.quantiser
    assert quantiser is not None
    made = quantised_in_pieces(quantiser, values.view(-1), at_once=64 * cut)
    assert torch.equal(made["packed"], packed)
    whole = quantiser.finish({"absmax": made["absmax"]} if nested else {})
    assert torch.equal(whole.get("absmax", made["absmax"]), state.absmax)
    assert torch.equal(whole["quant_map"], state.code)
    if nested:
        assert torch.equal(whole["nested_absmax"], state.state2.absmax)
        assert torch.equal(whole["nested_offset"], state.offset)
    assert {n: tuple(t.shape) for n, t in whole.items() if n in parts.whole} == {
        n: tuple(t.shape) for n, t in parts.whole.items()
    }, "what is on meta has the shapes of what will come"


class _Unknown(nn.Parameter):
    """Bytes with a meaning that only their library knows."""


class _OwnForward(bitsandbytes.nn.Linear8bitLt):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def _unknown() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.weight = _Unknown(torch.zeros(8, 4, dtype=torch.uint8), requires_grad=False)
    return layer


def _trainable() -> nn.Module:
    layer = LAYERS["torchao-int8"]()
    layer.weight.requires_grad_()
    return layer


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (_unknown, "parameter 'weight' is a _Unknown, whose values fcdp cannot take apart"),
        (_trainable, "parameter 'weight' is quantised but trainable"),
        (
            lambda: bitsandbytes.nn.Linear4bit(64, 64).requires_grad_(False),
            "parameter 'weight' is a Params4bit that is not quantised yet",
        ),
        (
            lambda: bitsandbytes.nn.Linear8bitLt(64, 64).requires_grad_(False),
            "parameter 'weight' is an Int8Params with has_fp16_weights=True",
        ),
        (
            lambda: _OwnForward(64, 64, has_fp16_weights=False).requires_grad_(False).to("cpu"),
            "parameter 'weight' is an Int8Params of a _OwnForward, whose forward fcdp does not know",
        ),
    ],
    ids=["unknown", "trainable", "early", "anew", "forward"],
)
def test_what_fcdp_cannot_take_apart_is_refused(layer, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        fcdp_compile.shard(layer())


def test_a_refused_model_is_as_it_was() -> None:
    model = adapted("nf4-nested")
    before = [(n, id(p)) for n, p in model.named_parameters()]
    classes = [type(m) for m in model.modules()]
    with pytest.raises(ArgumentError, match="no module of the model matches it"):
        fcdp_compile.shard(model, module_strategies={"nowhere": "ddp"})
    assert [(n, id(p)) for n, p in model.named_parameters()] == before
    assert [type(m) for m in model.modules()] == classes
    assert loss_of(model, 0).item() == loss_of(adapted("nf4-nested"), 0).item()


@pytest.mark.parametrize("nested", [False, True])
def test_conversions_leave_scales_as_the_kernels_need_them(nested: bool) -> None:
    """A model in bf16 may be converted to bf16 again."""
    plain, model = (
        nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64, compress_statistics=nested, bias=False))
        for _ in range(2)
    )
    model.load_state_dict(plain.state_dict())
    plain, model = (m.requires_grad_(False).to("cpu") for m in (plain, model))
    fcdp_compile.shard(model).to(torch.bfloat16)
    x = torch.randn(4, 64)
    assert torch.equal(model(x), plain(x))


def test_a_weight_that_is_replaced_after_shard_is_refused() -> None:
    model = fcdp_compile.shard(adapted("nf4", layers=1))
    model[0].base.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    assert model[0].base.weight.shape == (WIDTH, WIDTH)
    with pytest.raises(UnshardedParameterError, match="was added or replaced"):
        loss_of(model, 0)


class _Multiplies(nn.Module):
    """A module of one's own that holds a library's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.held = bitsandbytes.nn.Params4bit(torch.ones(64, 64), requires_grad=False).to("cpu")

    def forward(self, x: Tensor) -> Tensor:
        held = self.held
        return bitsandbytes.matmul_4bit(x, held.t(), quant_state=held.quant_state)


@pytest.mark.parametrize(
    "make", [lambda: bitsandbytes.nn.Embedding4bit(50, 64).to("cpu"), _Multiplies]
)
def test_any_module_may_hold_a_4_bit_weight(make: Callable[[], nn.Module]) -> None:
    module = make()
    x = torch.arange(7) if isinstance(module, nn.Embedding) else torch.randn(7, 64)
    expected = module(x)
    model = fcdp_compile.shard(nn.Sequential(module))
    assert torch.equal(model(x), expected)
    assert torch.equal(torch.compile(model, backend="fcdp")(x), expected)


def test_a_tied_weight_stays_one_and_ignored_ones_stay_the_librarys() -> None:
    model = nn.Sequential(four_bit("nf4", nested=False), four_bit("nf4", nested=False))
    model[1].weight = model[0].weight
    with unfolded(model, ["1.bias"]):
        assert model[0]._modules["weight"] is model[1]._modules["weight"]
    ignored = adapted("nf4", layers=1)
    fcdp_compile.shard(ignored, ignored_params=[ignored[0].base.weight])
    assert type(ignored[0].base.weight) is bitsandbytes.nn.Params4bit
    assert loss_of(ignored, 0).item() == loss_of(adapted("nf4", layers=1), 0).item()


def test_a_checkpoint_knows_what_its_bytes_stand_for(tmp_path: Path) -> None:
    saved, alike, other = (
        fcdp_compile.shard(nn.Sequential(four_bit(quant_type, nested=False)))
        for quant_type in ("nf4", "nf4", "fp4")
    )
    weight = saved[0]._modules["weight"]
    weight.recipe = weight.recipe.made_of(torch.bfloat16)
    fcdp_compile.save(tmp_path, saved)
    with pytest.raises(fcdp_compile.CheckpointError, match=r"is nf4 .* and here fp4 "):
        fcdp_compile.load(tmp_path, other)
    with pytest.raises(RuntimeError, match="is not the code book of fp4"):
        other.load_state_dict(saved.state_dict())
    fcdp_compile.load(tmp_path, alike)
    x = torch.randn(4, WIDTH)
    assert torch.equal(alike(x), saved(x)), "values of bf16 are rounded"


def test_an_8_bit_layer_keeps_its_threshold() -> None:
    layer = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=3.0)
    layer = layer.requires_grad_(False).to("cpu").eval()
    x = torch.randn(4, 64) * torch.where(torch.arange(64) == 5, 20.0, 1.0)
    expected = copy.deepcopy(layer)(x)
    model = fcdp_compile.shard(nn.Sequential(layer))
    assert torch.equal(model(x), expected)
    assert math.isfinite(expected.sum().item())


def test_a_plain_buffer_is_no_constant() -> None:
    """A program may change its buffers between a forward and its backward, even past torch's notice."""
    gradients = []
    for is_compiled in (False, True):
        model = _Masked()
        net: nn.Module = model
        if is_compiled:
            net = torch.compile(fcdp_compile.shard(model), backend="fcdp")
        x = torch.ones(2, 8, requires_grad=True)
        loss = net(x).sum()
        model.mask.data.zero_()
        loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert gradients[0].any()


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.arange(64.0).view(8, 8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("mask", torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.mask)


def test_a_quantised_weight_has_no_initialisation() -> None:
    with torch.device("meta"):
        layer = bitsandbytes.nn.Linear4bit(64, 64).requires_grad_(False)
    model = fcdp_compile.shard(nn.Sequential(layer))
    with pytest.raises(fcdp_compile.FcdpError, match=r"call fcdp_compile\.load_pretrained before"):
        fcdp_compile.materialize(model)
