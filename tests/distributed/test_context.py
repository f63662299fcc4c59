"""Sequences cut over the ranks of a node: losses, gradients and bytes of one process with whole sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.integrations.generation import generate_together
from fcdp_compile.models.parallel.context import repeats_of
from tests.device.choice import seeded
from tests.distributed.parity import values
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

Batch = dict[str, Tensor]
VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
    "attn_implementation": "sdpa",
}


def _llama(pairs: int = 2, heads: int = 4) -> nn.Module:
    sizes = {**SIZES, "num_attention_heads": heads, "hidden_size": 8 * heads}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=pairs))


def _lora() -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(_llama(), config)  # type: ignore[arg-type,return-value]


def _quantised(library: str) -> nn.Module:
    """LoRA on a base that bitsandbytes (NF4, double quantisation) or torchao (int8) has quantised."""
    model: Any = _checkpointed() if library == "bitsandbytes" else _llama()
    model.requires_grad_(False)
    for path, layer in [(p, m) for p, m in model.model.named_modules() if type(m) is nn.Linear]:
        if library == "torchao":
            import torchao.quantization as quantization  # tests skip without these libraries

            quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
            continue
        import bitsandbytes

        sizes = layer.in_features, layer.out_features
        made = bitsandbytes.nn.Linear4bit(
            *sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
        made.load_state_dict(layer.state_dict())
        model.model.set_submodule(path, made.to("cpu"))
        model.is_loaded_in_4bit = True  # so PEFT makes its own adapters for bitsandbytes
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config)  # type: ignore[return-value]


def _checkpointed() -> nn.Module:
    model = _llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model


def _mistral() -> nn.Module:
    return MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=5))


def _qwen() -> nn.Module:
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=4, **windows))


def _full(node: int, step: int, tokens: int = 16) -> Batch:
    generator = seeded(10 * step + node)
    ids = torch.randint(VOCABULARY, (2, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _odd(node: int, step: int) -> Batch:
    """The number of tokens is no multiple of the ranks; nodes have different numbers of targets."""
    batch = _full(node, step, 15)
    batch["labels"][:, : 3 + 4 * node] = -100
    return batch


def _padded(node: int, step: int, *, is_left: bool) -> Batch:
    batch = _full(node, step)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, : 5 + node] = 0
    mask = mask if is_left else mask.flip(1)
    batch["labels"][mask == 0] = -100
    return {**batch, "attention_mask": mask}


def _right(node: int, step: int) -> Batch:
    return _padded(node, step, is_left=False)


def _left(node: int, step: int) -> Batch:
    """Only the first node has padding, but all ranks must run the same graph."""
    return _padded(node, step, is_left=True) if node == 0 else _full(node, step)


def _packed(node: int, step: int) -> Batch:
    batch = {name: t[:1] for name, t in _full(node, step).items()}
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    batch["labels"][:, 7] = -100
    return {**batch, "position_ids": positions}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "full": (_llama, _full),
    "one pair of heads": (lambda: _llama(1), _full),
    "three heads": (lambda: _llama(1, heads=3), _full),
    "six heads on four ranks": (lambda: _llama(2, heads=6), _packed),
    "LoRA": (_lora, _odd),
    "bitsandbytes": (lambda: _quantised("bitsandbytes"), _odd),
    "torchao": (lambda: _quantised("torchao"), _odd),
    "checkpointing": (_checkpointed, _right),
    "left padding": (_llama, _left),
    "packed": (_llama, _packed),
    "window": (_mistral, _full),
    "windows in some layers": (_qwen, _odd),
}


RANKS = {"six heads on four ranks": 4}
"""How many ranks share a sequence; elsewhere 2."""


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _whole_loss(model: nn.Module, batches: list[Batch]) -> Tensor:
    """The mean over all targets of all batches, in one process."""
    targets = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    sums = [model(**b, num_items_in_batch=1).loss for b in batches]
    return torch.stack(sums).sum() / targets


def _train(case: str) -> Iterator[tuple[float, float]]:
    make, batch = CASES[case]
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    cp = RANKS.get(case, 2)
    groups = dist.get_world_size() // cp
    whole = fcdp_compile.make_mesh(nodes=groups, cp=cp)
    assert whole is not None
    model = fcdp_compile.context_parallel(make(), whole)
    fcdp_compile.shard(model, whole)
    net = torch.compile(model, backend="fcdp", options={"compute": "eager"})
    optimizer, other = _optimizer(model), _optimizer(plain)
    group = dist.get_rank() // cp
    for step in range(3):
        expected = _whole_loss(plain, [batch(n, step) for n in range(groups)])
        expected.backward()
        loss = net(**fcdp_compile.sequence_part(batch(group, step), whole)).loss
        loss.backward()
        for o in (optimizer, other):
            o.step()
            o.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        yield float(mean) / dist.get_world_size(), expected.item()
    own = values(model)
    for name, value in plain.named_parameters():
        if value.requires_grad:
            assert torch.allclose(own[name], value, atol=2e-5), (case, name)
    assert not fcdp_compile.explain(net).graph_breaks, case


def _parity(_mesh: DeviceMesh, cases: Sequence[str]) -> None:
    for case in cases:
        torch._dynamo.reset()
        for loss, expected in _train(case):
            assert loss == pytest.approx(expected, rel=1e-5), case


_QUANTISED = ("bitsandbytes", "torchao")
_FEW = ("three heads", "left padding", "packed")


@pytest.mark.parametrize(
    "cases",
    [_FEW, tuple(CASES.keys() - {*_FEW, *_QUANTISED})],
    ids=["few", "rest"],
)
@pytest.mark.slow
def test_losses_and_parameters_are_those_of_whole_sequences(cases: Sequence[str]) -> None:
    run(_parity, cases, nodes=2, ranks_per_node=2)


@pytest.mark.rare
@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_quantised_bases_train_as_with_whole_sequences(library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    run(_parity, (library,), nodes=2, ranks_per_node=2)


def test_each_rank_gets_the_pairs_of_its_heads() -> None:
    for pairs, group, ranks in itertools.product(range(1, 7), range(1, 7), range(1, 9)):
        heads = pairs * group
        times = repeats_of(heads, pairs, ranks)
        sent = [p for p in range(pairs) for _ in range(times)]
        of_rank = -(-heads // ranks), -(-len(sent) // ranks)
        for head in range(heads):
            rank, place = divmod(head, of_rank[0])
            pair = rank * of_rank[1] + place * of_rank[1] // of_rank[0]
            assert sent[pair] == head // group, (heads, pairs, ranks)
        if heads % ranks == pairs % ranks == 0:
            assert times == 1


def _sent(mesh: DeviceMesh) -> None:
    """Between nodes, context parallelism sends what the same batch on each rank would.

    Models then generate the same, from whole sequences, and go on training with parts.
    """
    sent, generated = [], []
    for cp in (1, 2):
        torch.manual_seed(0)
        torch._dynamo.reset()
        whole = fcdp_compile.make_mesh(nodes=2, cp=cp)
        model = fcdp_compile.shard(fcdp_compile.context_parallel(_llama(), whole), whole)
        net = torch.compile(model, backend="fcdp", options={"compute": "eager"})
        optimizer = _optimizer(model)
        for step in range(2):
            batch = _full(mesh.get_local_rank("inter"), step)
            net(**fcdp_compile.sequence_part(batch, whole)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not step:
                told: Any = {"max_new_tokens": 4, "use_cache": True, "do_sample": False}
                generate_together(model, "whole")
                generated.append(model.generate(batch["input_ids"][:, :5], **told))  # type: ignore[operator]
        sent.append(dict(state_of(model).counters.last_step))
    assert torch.equal(*generated)
    assert sent[0] == sent[1]
    assert sent[0]["inter_all_gather"] > 0


def _refusals(mesh: DeviceMesh) -> None:
    def refused(
        match: str, act: Callable[[], object], error: type[Exception] = ArgumentError
    ) -> None:
        with pytest.raises(error, match=match):
            act()

    refused(r"cp=3 must be a whole number that divides", lambda: fcdp_compile.make_mesh(2, cp=3))
    rank = dist.get_rank()
    refused(
        r"rank 0 has cp=1 and rank 1 has cp=2",
        lambda: fcdp_compile.make_mesh(2, cp=1 + (rank == 1)),
    )
    whole = fcdp_compile.make_mesh(nodes=2, cp=2)
    assert whole is not None
    assert whole.mesh_dim_names == ("inter", "intra", "cp")
    models = {
        "takes a model of Transformers": nn.Linear(2, 2),
        r"attn_implementation='eager' cannot compute some": LlamaForCausalLM(
            LlamaConfig(**{**SIZES, "attn_implementation": "eager"})
        ),
        "layers of type 'chunked_attention'": LlamaForCausalLM(
            LlamaConfig(**SIZES, layer_types=["full_attention", "chunked_attention"])
        ),
        "call it before fcdp_compile.shard": fcdp_compile.shard(_llama(), mesh),
        "its labels are not the next tokens": LlamaForTokenClassification(
            LlamaConfig(**SIZES, num_key_value_heads=4)
        ),
        "counts positions itself": OPTForCausalLM(
            OPTConfig(
                hidden_size=32,
                ffn_dim=32,
                num_hidden_layers=1,
                num_attention_heads=4,
                word_embed_proj_dim=32,
            )
        ),
        "puts virtual tokens before the part of every rank": peft.get_peft_model(
            LlamaForCausalLM(LlamaConfig(**SIZES)),
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        ),
        "a second time; call it once": fcdp_compile.context_parallel(_llama(), whole),
    }
    for match, model in models.items():
        refused(match, lambda model=model: fcdp_compile.context_parallel(model, whole))  # type: ignore[misc]
    batch = _full(mesh.get_local_rank("inter"), 0)
    parts: list[tuple[str, Any]] = [
        ("does not know how to cut 'token_type_ids'", {**batch, "token_type_ids": batch["labels"]}),
        ("does not know how to cut 'seq_idx'", {**batch, "seq_idx": batch["labels"]}),
        (r"labels has shape \(2, 5\)", {**batch, "labels": batch["labels"][:, :5]}),
        ("needs input_ids of shape", {}),
        ("different batches, but share their sequences", _full(rank, 0)),
    ]
    for match, given in parts:
        refused(match, lambda given=given: fcdp_compile.sequence_part(given, whole))  # type: ignore[misc]
    model = fcdp_compile.context_parallel(_llama(), whole)
    refused("sees one rank's part of the sequences", lambda: fcdp_compile.shard(_llama(), whole))
    refused("got no sequence_ids", lambda: model(batch["input_ids"]), FcdpError)


@pytest.mark.slow
def test_bytes_and_refusals() -> None:
    run(_sent, nodes=2, ranks_per_node=2)
    run(_refusals, nodes=2, ranks_per_node=2)
