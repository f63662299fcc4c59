"""A few cases of other projects' suites; `make peers` runs all."""

from __future__ import annotations

import importlib
import os

import pytest

from tests.peers import fsdp_tests, serving, sources
from tests.peers.outcomes import Status

pytestmark = pytest.mark.distributed

_MODULES = [
    f"{name} train float32 compiled"
    for name in ("Linear", "Conv2d", "LayerNorm", "Embedding", "PReLU")
]
_OPERATORS = [
    *("amax", "gather", "index_put", "linalg.vector_norm", "masked_select", "matmul", "stft"),
    *("scatter_add", "unflatten", "view"),
    *(f"nn.functional.{name}" for name in ("conv1d", "huber_loss", "linear_cross_entropy")),
    *(f"nn.functional.{name}" for name in ("embedding", "mse_loss", "normalize")),
]
_PEFT = [
    "Vanilla MLP 4 LoRA, compiled",
    "Vanilla MLP 4 LoRA, eager",
    "Vanilla MLP 7 LoRA with DoRA, compiled",
    "Vanilla MLP 4 LOHA, eager",
]
_TRANSFORMERS = [
    "llama, save_load_dcp, DCP",
    "gpt2, hsdp_save_load, load_pretrained",
    "ernie4_5_moe, bf16_training, eager",
]

_FSDP = [
    "training.test_non_root_forward_backward, eager",
    "training.test_multi_forward_module, compiled",
    "state_dict.test_2d_state_dict_correctness, eager",
]


def _run(suite: str, cases: list[str]) -> None:
    unknown = set(cases) - set(importlib.import_module(suite).cases())
    assert not unknown, f"the suite has no {unknown}"
    found = dict(serving.outcomes(suite, cases))
    wrong = {case: one for case, one in found.items() if one.status is not Status.EQUAL}
    assert not wrong, wrong


@pytest.mark.slow
def test_operators_of_torch() -> None:
    pytest.importorskip("expecttest", reason="torch's table of operators needs expecttest")
    _run("tests.peers.operators", _OPERATORS)


@pytest.mark.slow
def test_modules_of_torch() -> None:
    pytest.importorskip("expecttest", reason="torch's table of modules needs expecttest")
    _run("tests.peers.modules", _MODULES)


@pytest.mark.slow
def test_adapters_of_peft() -> None:
    if not sources.is_fetched("peft"):
        pytest.skip("PEFT's tests are not fetched; run `make peers`")
    _run("tests.peers.peft_models", _PEFT)


def test_fsdp_tests_of_transformers() -> None:
    if not sources.is_fetched("transformers"):
        pytest.skip("Transformers' tests are not fetched; run `make peers`")
    _run("tests.peers.transformers_fsdp", _TRANSFORMERS)


def test_fsdp2_of_pytorch() -> None:
    if fsdp_tests.FOLDER not in os.environ:
        pytest.skip(f"{fsdp_tests.FOLDER} names no folder with PyTorch's tests of FSDP2")
    _run("tests.peers.fsdp_tests", _FSDP)
