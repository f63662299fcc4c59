"""Each bad input gets one clear sentence, before any collective is started."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore

import fcdp_compile
from fcdp_compile.errors import FcdpError, UnshardedParameterError, UnsynchronizedGradientError
from tests.device.choice import device_kind
from tests.distributed.models import CASES, batch, with_lora
from tests.distributed.ranks import run

distributed = pytest.mark.distributed
HERE = "cpu" if device_kind() == "cpu" else f"{device_kind()}:0"


def _linear(weight: Tensor | None = None) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if weight is not None:
        is_parameter = isinstance(weight, nn.Parameter)
        made = weight if is_parameter else nn.Parameter(weight, weight.is_floating_point())
        model[0].weight = made
    return model


def _keeping(keep: Callable[[nn.Module, Tensor], object]) -> nn.Module:
    """A model that keeps its first weight in another place, too."""
    model = _linear()
    vars(model)["kept"] = keep(model, model[0].weight)
    return model


def _parametrise(model: nn.Module, weight: Tensor) -> None:
    class Added(nn.Module):
        def forward(self, own: Tensor) -> Tensor:
            return own + weight

    parametrize.register_parametrization(model.get_submodule("1"), "weight", Added())


def _quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.rand(4, 4), 0.1, 0, torch.qint8)


class _Masked(nn.Parameter):
    """A parameter with a method of its own."""

    def masked(self) -> Tensor:
        return self.triu()


def _with_grad_dtype() -> nn.Parameter:
    parameter = nn.Parameter(torch.eye(4, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    return parameter


# --- one process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"target_modules": ["0"]}, {"target_parameters": ["1.weight"]}]
)
def test_adapters_that_exchange_a_parameter_are_refused(options: dict[str, list[str]]) -> None:
    """PEFT puts a merged tensor in the parameter's place while the module computes."""
    base = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    model = get_peft_model(base, LoraConfig(**options))
    with pytest.raises(FcdpError, match=r"base_model\.model\.[01] has an adapter of PEFT"):
        fcdp_compile.shard(model)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: _linear(torch.eye(4).to_sparse()), "'0.weight' is sparse"),
        (lambda: _linear(torch.eye(4).to_sparse_csr()), "'0.weight' is sparse"),
        (lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), "0 .Embedding. makes sparse grad"),
        (lambda: nn.EmbeddingBag(4, 2, sparse=True), "the model .EmbeddingBag. makes sparse grad"),
        (lambda: _linear(torch.rand(4, 4, dtype=torch.complex64)), "'0.weight' is complex"),
        (lambda: _linear(_quantised()), "'0.weight' is quantised"),
        (lambda: nn.LazyLinear(4), "'weight' is not initialised; run one forward"),
        (lambda: _linear(_Masked(torch.eye(4))), "'0.weight' is of class _Masked"),
        (lambda: _linear(_with_grad_dtype()), "'0.weight' asks for a gradient in torch.float32"),
        (
            lambda: nn.Sequential(nn.LSTM(4, 4)),
            r"0 keeps parameter '0.weight_ih_l0' in its _flat_weights\[0\]",
        ),
        (
            lambda: _keeping(lambda m, w: [w]),
            r"the model keeps parameter '0.weight' in its kept\[0\]",
        ),
        (lambda: _keeping(lambda m, w: {"w": (1, w)}), r"in its kept\['w'\]\[1\]"),
        (lambda: _keeping(lambda m, w: lambda: w), "in its kept"),
        (lambda: _keeping(lambda m, w: w.view(-1)), "in its kept"),
        (lambda: _keeping(lambda m, w: m.register_buffer("b", w.data)), r"in its _buffers\['b'\]"),
        (
            lambda: _keeping(lambda m, w: m.register_forward_hook(lambda m, i, o: o + w.sum())),
            "in its _forward_hooks",
        ),
        (
            lambda: _keeping(lambda m, w: w.register_hook(lambda g: g + w)),
            "a hook on the gradient of parameter '0.weight' keeps parameter '0.weight' in its closure",
        ),
        (
            lambda: _keeping(lambda m, w: register_multi_grad_hook([w], print) and None),
            "a hook on the gradient of parameter '0.weight' keeps",
        ),
        (lambda: _keeping(_parametrise), "1.parametrizations.weight.0 keeps .* in its forward"),
        (lambda: nn.ReLU(), "has no parameters"),
        (lambda: fcdp_compile.shard(_linear()), "is sharded already"),
        (lambda: nn.Sequential(fcdp_compile.shard(_linear())), "0 is sharded already"),
        (lambda: nn.DataParallel(_linear()), "is wrapped in DataParallel"),
    ],
)
def test_a_model_that_cannot_be_sharded(make: Callable[[], nn.Module], what: str) -> None:
    _one_sentence(ValueError, lambda: fcdp_compile.shard(make()), what)


class _SparseLookup(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight, sparse=True)


def test_a_sparse_gradient_that_only_its_backward_shows() -> None:
    loss = fcdp_compile.shard(_SparseLookup(4, 2))(torch.tensor([1, 2])).sum()
    _one_sentence(FcdpError, loss.backward, "gradient of parameter 'weight' is sparse")


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"strategy": "zero+"}, ValueError, r"unknown strategy .zero\+.; .*did you mean .zero"),
        ({"strategy": "FCDP"}, ValueError, "did you mean 'fcdp'"),
        ({"strategy": "qqq"}, ValueError, "choose one of ddp, zero1, zero2, .*"),
        ({"strategy": 3}, TypeError, "strategy must be a name or a Strategy, not int"),
        ({"mesh": 4}, TypeError, "mesh must be a DeviceMesh or None, not int"),
        ({"param_dtype": "bf16"}, TypeError, "param_dtype must be a floating point torch.dtype"),
        ({"param_dtype": torch.int8}, TypeError, "param_dtype must be a floating point"),
        ({"reduce_dtype": torch.complex64}, TypeError, "reduce_dtype must be a floating point"),
    ],
)
def test_an_option_of_shard(options: dict[str, Any], error: type[Exception], what: str) -> None:
    _one_sentence(error, lambda: fcdp_compile.shard(_linear(), **options), what)


@pytest.mark.parametrize("model", [3, "gpt2", lambda x: x, None, nn.Linear])
def test_what_is_no_module(model: Any) -> None:
    _one_sentence(TypeError, lambda: fcdp_compile.shard(model), "shard needs an nn.Module, not")


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"comput": "eager"}, ValueError, "unknown option 'comput'.*did you mean 'compute'"),
        ({"bucket": 3}, ValueError, "known are compute, dump, bucket_mb"),
        ({"compute": "cuda"}, ValueError, "'compute' must be 'inductor' or 'eager', not 'cuda'"),
        ({"compute": True}, TypeError, "'compute' must be 'inductor' or 'eager', not bool"),
        ({"dump": 3}, TypeError, "'dump' must be a folder's path, not int"),
        ({"bucket_mb": "25"}, TypeError, "'bucket_mb' must be a number of MiB, not str"),
        ({"bucket_mb": True}, TypeError, "'bucket_mb' must be a number of MiB, not bool"),
        ({"bucket_mb": -1}, ValueError, "'bucket_mb' must be between"),
        ({"bucket_mb": float("nan")}, ValueError, "'bucket_mb' must be between"),
    ],
)
def test_an_option_of_the_backend(
    options: dict[str, Any], error: type[Exception], what: str
) -> None:
    torch._dynamo.reset()
    net = torch.compile(fcdp_compile.shard(_linear()), backend="fcdp", options=options)
    with pytest.raises(Exception, match=what) as raised:
        net(torch.rand(2, 4))
    causes = [raised.value, raised.value.__cause__, raised.value.__context__]
    assert any(isinstance(cause, error) for cause in causes)


def test_a_world_that_does_not_divide_into_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    make = fcdp_compile.make_mesh
    _one_sentence(ValueError, lambda: make(nodes=2), "needs several processes and this is a single")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    dist.init_process_group("fake", rank=0, world_size=6, store=FakeStore())
    try:
        _one_sentence(ValueError, make, "world size 6 cannot be split into nodes of 4 ranks")
        _one_sentence(
            ValueError, lambda: make(nodes=4), "world size 6 cannot be split into 4 nodes"
        )
        for bad in (0, 2.0):
            _one_sentence(
                ValueError,
                lambda: make(nodes=bad),  # type: ignore[arg-type]  # noqa: B023
                "nodes must be a positive whole number",
            )
    finally:
        dist.destroy_process_group()


def _late_layer(model: nn.Module) -> None:
    model.append(nn.Linear(4, 4))


def _replaced(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.rand(4, 4))


def _late_adapter(model: nn.Module) -> None:
    get_peft_model(model, LoraConfig(target_modules=["0"]))


def _only_no_sync(model: nn.Module) -> None:
    net = torch.compile(model, backend="fcdp")
    with fcdp_compile.no_sync(model):
        net(torch.rand(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("act", "error", "what"),
    [
        (_late_layer, UnshardedParameterError, "'2.weight' was added or replaced after"),
        (_replaced, UnshardedParameterError, "'0.weight' was added or replaced after"),
        (_late_adapter, UnshardedParameterError, "'0.lora_A.default.weight' was added or replaced"),
        (nn.Module.half, FcdpError, "cannot become torch.float16 on cpu; convert the model before"),
        (_only_no_sync, UnsynchronizedGradientError, "run the last micro-batch"),
    ],
)
def test_what_several_ranks_refuse_one_process_refuses(
    act: Callable[[nn.Module], Any], error: type[Exception], what: str
) -> None:
    for is_compiled in (False, True):
        torch._dynamo.reset()
        model = fcdp_compile.shard(_linear())
        net = torch.compile(model, backend="fcdp") if is_compiled else model
        with pytest.raises(Exception, match=what) as raised:
            _ = act(model), net(torch.rand(2, 4))
        assert error.__name__ in f"{type(raised.value).__name__}: {raised.value}"


def test_a_step_after_a_cleared_no_sync_is_fine() -> None:
    model = fcdp_compile.shard(_linear())
    net = torch.compile(model, backend="fcdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fcdp_compile.no_sync(model):
        net(torch.rand(2, 4)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    net(torch.rand(2, 4)).sum().backward()
    optimizer.step()


def _step_an_older_optimizer(mesh: DeviceMesh | None) -> None:
    model = _linear()
    optimizer = torch.optim.AdamW(model.parameters())
    fcdp_compile.shard(model, mesh)
    torch.optim.AdamW(model.parameters()).step()
    _one_sentence(
        FcdpError, optimizer.step, "AdamW was built before .*build the optimizer after sharding"
    )


def test_an_optimizer_built_before_shard() -> None:
    _step_an_older_optimizer(None)


def test_a_sharded_model_is_not_copied() -> None:
    model = fcdp_compile.shard(_linear())
    for attempt in (lambda: copy.deepcopy(model), lambda: pickle.dumps(model)):
        _one_sentence(TypeError, attempt, "cannot be copied or pickled.*save its state_dict")


def test_traffic_of_a_model_that_is_not_sharded() -> None:
    _one_sentence(ValueError, lambda: fcdp_compile.traffic(_linear()), "not sharded")


def test_folders_and_models_that_are_swapped_or_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, folder = fcdp_compile.shard(_linear()), str(tmp_path / "saved")
    given = "as the folder and str as the model, which are swapped; a folder is a path"
    for call, swapped in (
        ("save(folder, model)", lambda: fcdp_compile.save(model, folder)),
        ("save(folder, model)", lambda: fcdp_compile.save(model, model=folder)),
        ("load(folder, model)", lambda: fcdp_compile.load(model, folder)),
        ("save_pretrained(model, folder)", lambda: fcdp_compile.save_pretrained(folder, model)),
        ("load_pretrained(model, folder)", lambda: fcdp_compile.load_pretrained(folder, model)),
    ):
        for error in (fcdp_compile.FcdpError, TypeError, ValueError):
            _one_sentence(error, swapped, f"fcdp_compile.{re.escape(call)} was given .*{given}")
    for nameless in (
        lambda: fcdp_compile.save("", model),
        lambda: fcdp_compile.load("", model),
        lambda: fcdp_compile.save_pretrained(model, ""),
        lambda: fcdp_compile.load_pretrained(model, ""),
    ):
        _one_sentence(fcdp_compile.FcdpError, nameless, "the folder is an empty string")
    assert not list(tmp_path.iterdir())
    fcdp_compile.save(folder, model)
    fcdp_compile.load(folder, model=model)


def _one_sentence(error: type[Exception], call: Callable[[], Any], what: str) -> None:
    with pytest.raises(error, match=what) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert not str(raised.value).endswith(".")


# --- several processes ----------------------------------------------------------------------------------


def _messages(mesh: DeviceMesh) -> dict[str, str]:
    """Rank 0's messages, while rank 1 waits elsewhere: no collective can have been started."""
    make = partial(init_device_mesh, mesh.device_type)
    flat = make((2,), mesh_dim_names=("data",))
    nameless = make((2, 1))
    swapped = make((2, 1), mesh_dim_names=("intra", "inter"))
    wrapped = DistributedDataParallel(_linear())
    fsdp = _linear()
    fully_shard(fsdp, mesh=flat)
    sharded = fcdp_compile.shard(CASES["odd"].model(), mesh)
    adapted = with_lora(sharded, "first", "second")
    replaced = fcdp_compile.shard(CASES["odd"].model(), mesh)
    replaced.embedding.weight = nn.Parameter(torch.rand(17, 7))  # the first to be read
    plain = fcdp_compile.shard(CASES["odd"].model(), mesh)
    moved = fcdp_compile.shard(CASES["odd"].model(), mesh).to(mesh.device_type, torch.float32)
    found: dict[str, str] = {}
    if dist.get_rank() == 0:

        def note(name: str, call: Callable[[], Any]) -> None:
            torch._dynamo.reset()
            try:
                call()
            except Exception as error:
                found[name] = f"{' '.join(c.__name__ for c in type(error).__mro__)}: {error}"
            else:
                found[name] = "nothing"

        shard = fcdp_compile.shard
        note("no mesh", lambda: shard(_linear()))
        note("flat mesh", lambda: shard(_linear(), flat))
        note("nameless mesh", lambda: shard(_linear(), nameless))
        note("swapped mesh", lambda: shard(_linear(), swapped))
        note("ddp", lambda: shard(wrapped, mesh))
        note("fsdp", lambda: shard(fsdp, mesh))
        note("inner ddp", lambda: shard(nn.Sequential(wrapped), mesh))
        note("sharded", lambda: shard(sharded, mesh))
        note("strategy", lambda: shard(_linear(), mesh, strategy="fccdp"))
        ids = batch(CASES["odd"], step=0, rank=0)
        note("never sharded", lambda: torch.compile(_linear(), backend="fcdp")(torch.rand(2, 4)))
        note("adapters after", lambda: torch.compile(adapted, backend="fcdp")(ids))
        note("replaced", lambda: torch.compile(replaced, backend="fcdp")(ids))
        note("replaced, eager", lambda: replaced(ids))
        note("half", plain.half)
        note("to", lambda: plain.to(torch.bfloat16))
        note("to meta", lambda: plain.to("meta"))
        note("copied", lambda: copy.deepcopy(moved))
        note("pickled", lambda: pickle.dumps(moved))
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    found: dict[str, str] = run(_messages, nodes=2, ranks_per_node=1)[0]
    return found


@distributed
@pytest.mark.parametrize(
    ("case", "error", "what"),
    [
        ("no mesh", ValueError, "2 processes run but shard got no mesh; pass"),
        ("flat mesh", ValueError, "expected ('inter', 'intra')"),
        ("nameless mesh", ValueError, "without names, expected ('inter', 'intra')"),
        ("swapped mesh", ValueError, "expected ('inter', 'intra')"),
        ("ddp", ValueError, "is wrapped in DistributedDataParallel; pass the bare module"),
        ("fsdp", ValueError, "is a DTensor already (FSDP2 or tensor parallelism)"),
        ("inner ddp", ValueError, "0 is wrapped in DistributedDataParallel"),
        ("sharded", ValueError, "is sharded already"),
        ("strategy", ValueError, "did you mean 'fcdp'"),
        ("never sharded", UnshardedParameterError, "call fcdp_compile.shard on the whole model"),
        (
            "adapters after",
            UnshardedParameterError,
            "'first.lora_A.default.weight' was added or replaced after fcdp_compile.shard",
        ),
        (
            "replaced",
            UnshardedParameterError,
            "'embedding.weight' was added or replaced after fcdp_compile.shard",
        ),
        (
            "replaced, eager",
            UnshardedParameterError,
            "'embedding.weight' was added or replaced after fcdp_compile.shard",
        ),
        ("half", FcdpError, f"cannot become torch.float16 on {HERE}; convert the model before"),
        ("to", FcdpError, f"cannot become torch.bfloat16 on {HERE}; convert the model before"),
        ("to meta", FcdpError, "cannot become torch.float32 on meta; convert the model before"),
        ("copied", TypeError, "cannot be copied or pickled"),
        ("pickled", TypeError, "cannot be copied or pickled"),
    ],
)
def test_bad_input_with_several_processes(
    messages: dict[str, str], case: str, error: type[Exception], what: str
) -> None:
    assert what in messages[case]
    assert error.__name__ in messages[case], (
        "Dynamo wraps what is raised while it traces, and keeps its name"
    )


def _converted(mesh: DeviceMesh) -> float:
    """`to` that changes nothing is allowed, and does nothing."""
    model = fcdp_compile.shard(CASES["odd"].model(), mesh).to(mesh.device_type, torch.float32)
    net = torch.compile(model, backend="fcdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        loss = CASES["odd"].loss(net, batch(CASES["odd"], step=step, rank=dist.get_rank()))
        loss.backward()
        optimizer.step()
    return loss.item()


def _allowed_and_not(mesh: DeviceMesh) -> float:
    _step_an_older_optimizer(mesh)
    return _converted(mesh)


@distributed
def test_a_conversion_to_what_it_is_and_an_older_optimizer() -> None:
    assert all(isinstance(x, float) for x in run(_allowed_and_not, nodes=2, ranks_per_node=1))
