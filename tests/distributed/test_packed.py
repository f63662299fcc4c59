"""Quantised bases on 2 nodes x 2 ranks: parity, bytes, and loading without the whole weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fcdp_compile
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.models.quantised.weight import QuantisedWeight
from tests.device.choice import is_simulated
from tests.distributed.ranks import run
from tests.marks import quick
from tests.quantised.layers import adapted, loss_of

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytest.importorskip("torchao", reason="torchao is not installed")
pytestmark = pytest.mark.distributed

STEPS = 3
SIMILAR = {"torchao-nf4": 1e-4}
"""Relative tolerance of losses where a layer computes in bf16; elsewhere 1e-6."""


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _replicated(kind: str, world: int) -> list[float]:
    model = adapted(kind)
    optimizer, losses = _sgd(model), []
    for step in range(STEPS):
        parts = [loss_of(model, step, rank, world) for rank in range(world)]
        loss = torch.stack(parts).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _train(mesh: DeviceMesh, kinds: list[tuple[str, str, bool]]) -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    results = []
    for kind, strategy, checkpointed in kinds:
        torch._dynamo.reset()
        model = fcdp_compile.shard(
            adapted(kind, checkpointed=checkpointed), mesh, strategy=strategy
        )
        net, optimizer = torch.compile(model, backend="fcdp"), _sgd(model)
        state = state_of(model)
        losses, sent = [], []
        for step in range(STEPS):
            before = state.counters.sent.get("inter_all_gather", 0)
            loss = loss_of(net, step, rank, world)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sent.append(state.counters.sent.get("inter_all_gather", 0) - before)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / world)
        records = [(r.spec, not r.parameter().requires_grad) for r in state.records.values()]
        slots = {
            of: sum(_slot_bytes(s) for s, frozen in records if frozen is of) for of in (False, True)
        }
        packed = sum(_slot_bytes(spec) for spec, _ in records if spec.is_packed)
        results.append((losses, sent, slots, packed))
    return results


def _slot_bytes(spec: ParamSpec) -> int:
    return spec.layout.slot_elements * spec.gather_dtype.itemsize


Case = tuple[str, str, bool]


def _here(cases: list[Case]) -> list[Case]:
    """The cases that the device has; only torch's own devices let bitsandbytes move its parameters there."""
    return [c for c in cases if not is_simulated() or c[0].startswith("torchao")]


CASES = _here(
    [
        *((kind, "fcdp", False) for kind in ("nf4", "nf4-nested", "int8", "torchao-int8")),
        ("nf4-nested", "fcdp", True),
        ("torchao-nf4", "fcdp", False),
        ("nf4", "fcdp+c8", False),
        ("torchao-mx8", "zero3", False),
    ]
)


_FEW = [c for c in CASES if c[0] in ("nf4-nested", "torchao-nf4") and not c[2]]
_REST = [c for c in CASES if c not in _FEW]


@pytest.mark.parametrize("cases", quick([_FEW, _REST], _FEW), ids=["few", "rest"])
def test_a_quantised_base_trains_as_replicated_and_crosses_the_network_once(
    cases: list[Case],
) -> None:
    ranks = run(_train, cases, nodes=2, ranks_per_node=2)
    for i, (kind, strategy, checkpointed) in enumerate(cases):
        case = f"{kind} {strategy} checkpointed={checkpointed}"
        losses, sent, slots, packed = ranks[0][i]
        assert losses[-1] < losses[0], case
        if strategy.endswith("c8"):  # which rounds the adapters and biases, but no packed bytes
            assert packed <= sent[0] - sent[-1] < slots[True], case
            continue
        expected = torch.tensor(_replicated(kind, 4))
        rtol = SIMILAR.get(kind, 1e-6)
        torch.testing.assert_close(torch.tensor(losses), expected, rtol=rtol, atol=0, msg=case)
        if strategy == "zero3":
            assert sent[0] == sent[-1], case
        else:
            assert (sent[0], sent[-1]) == (slots[False] + slots[True], slots[False]), case


@pytest.mark.slow
def test_on_one_node_a_quantised_base_is_loaded_from_the_host() -> None:
    cases = [(kind, "fcdp", kind == "int8") for kind in ("nf4-nested", "int8", "torchao-int8")]
    cases = _here(cases)
    for found in run(_train, cases, nodes=1, ranks_per_node=2):
        for (kind, *_), (losses, sent, _, _) in zip(cases, found, strict=True):
            expected = torch.tensor(_replicated(kind, 2))
            torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-6, atol=0)
            assert not any(sent)


def _load(mesh: DeviceMesh, folders: list[Path], options: dict[str, Any]) -> None:
    for folder in folders:
        model = _on_meta(folder, options)
        fcdp_compile.shard(model, mesh)
        fcdp_compile.load_pretrained(model, folder)
        fcdp_compile.materialize(model)
        found = dict(model.named_buffers())
        for name, parameter in model.named_parameters():
            found[name] = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if dist.get_rank() == 0:
            torch.save({name: tensor.detach() for name, tensor in found.items()}, folder / "loaded")


def _load_where_one_rank_fails(mesh: DeviceMesh, folder: Path, options: dict[str, Any]) -> str:
    """What this rank is told if rank 1 fails after the last tensor was read, before others gather again.

    Before, ranks that have quantised the same model in two formats are refused.
    """
    with pytest.raises(ArgumentError, match="are about to shard different models"):
        fcdp_compile.shard(adapted("nf4" if dist.get_rank() == 0 else "fp4"), mesh)
    model = fcdp_compile.shard(_on_meta(folder, options), mesh)
    if dist.get_rank() == 1:
        bitsandbytes.functional.quantize_blockwise = _fails
    with pytest.raises(FcdpError) as raised:
        fcdp_compile.load_pretrained(model, folder)
    return str(raised.value)


def _fails(*args: object, **kwargs: object) -> None:
    raise RuntimeError("no memory")


def _on_meta(folder: Path, options: dict[str, Any]) -> nn.Module:
    import transformers  # optional
    from transformers.quantizers import AutoHfQuantizer

    config = transformers.AutoConfig.from_pretrained(folder)
    quantizer = AutoHfQuantizer.from_config(
        transformers.BitsAndBytesConfig(**options), pre_quantized=False
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        quantizer.preprocess_model(model, dtype=torch.bfloat16, device_map={"": "cpu"})
    model.requires_grad_(False)
    return model


NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.bfloat16,
}
INT8 = {"load_in_8bit": True}


@pytest.mark.cpu
@pytest.mark.parametrize(
    "options", [NF4, pytest.param(INT8, marks=pytest.mark.slow)], ids=["nf4", "int8"]
)
def test_a_checkpoint_is_quantised_as_the_library_does(
    options: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    _write_llama(tmp_path)
    library, already = _from_pretrained(tmp_path, options), tmp_path / "quantised"
    library.save_pretrained(already)
    run(_load, [tmp_path, already], options, nodes=2, ranks_per_node=2)
    if "load_in_4bit" in options:
        (told,) = set(run(_load_where_one_rank_fails, tmp_path, options, nodes=2, ranks_per_node=1))
        assert told.endswith("so the model is half loaded: rank 1: no memory")
    expected = fcdp_compile.shard(library.requires_grad_(False))
    weights = [m for m in expected.modules() if isinstance(m, QuantisedWeight)]
    assert len(weights) == 7
    own = {**dict(expected.named_buffers()), **dict(expected.named_parameters())}
    for loaded in (torch.load(folder / "loaded") for folder in (tmp_path, already)):
        assert own.keys() == loaded.keys()
        for name, tensor in own.items():
            assert tensor.dtype == loaded[name].dtype
            assert torch.equal(tensor.detach(), loaded[name]), name


def _write_llama(folder: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).half().save_pretrained(folder)


def _from_pretrained(folder: Path, options: dict[str, Any]) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.BitsAndBytesConfig(**options),
        device_map="cpu",
        dtype=torch.bfloat16,
    )


def _merge(mesh: DeviceMesh, folder: Path) -> None:
    import peft

    for name, options in (("nf4", NF4), ("int8", INT8)):
        model = peft.PeftModel.from_pretrained(
            _from_pretrained(folder, options), folder / "adapter"
        )
        fcdp_compile.shard(model, mesh)
        fcdp_compile.save_pretrained(model, folder / name, merge=True)


@pytest.mark.cpu
def test_adapters_are_merged_into_the_dequantised_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    _write_llama(tmp_path)
    adapters = peft.LoraConfig(
        target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    peft.get_peft_model(_from_pretrained(tmp_path, NF4), adapters).save_pretrained(
        tmp_path / "adapter"
    )
    run(_merge, tmp_path, nodes=2, ranks_per_node=1)
    for name, options in (("nf4", NF4), ("int8", INT8)):
        base = _from_pretrained(tmp_path, options).dequantize()
        peft.PeftModel.from_pretrained(
            base, tmp_path / "adapter"
        ).merge_and_unload().save_pretrained(tmp_path / "expected")
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / name / file).read_bytes() == (
                tmp_path / "expected" / file
            ).read_bytes()
