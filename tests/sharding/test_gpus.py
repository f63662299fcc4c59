"""Detection of GPUs and their process groups, tested without a GPU."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fcdp_compile import make_mesh
from fcdp_compile.core.params import mesh
from fcdp_compile.core.sharding.refusals import warn_of_torch
from fcdp_compile.core.sharding.replicas import agree_on_gpus
from fcdp_compile.devices import Cpu, Cuda, are_on_stream
from fcdp_compile.errors import ArgumentError

_CUDA, _CPU = Cuda(torch.device("cuda", 0)), Cpu()


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("undefined", "cuda:nccl", True),  # init_process_group() on a machine with GPUs
        ("undefined", "cpu:gloo", False),
        ("nccl", "cuda:nccl", True),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", True),
        ("gloo", "cpu:gloo,cuda:gloo", False),
    ],
)
@pytest.mark.usefixtures("world")
def test_a_group_has_nccl_by_whatever_name(
    name: str,
    config: str,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group=None: name)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)
    assert are_on_stream("cuda", None) is expected
    group: Any = dist.group.WORLD
    with caplog.at_level(logging.WARNING):
        mesh._warn_of_staging("cpu", [group, group])
        assert not caplog.records
        mesh._warn_of_staging("cuda", [group, group])
    said = [record.getMessage() for record in caplog.records]
    assert said == [] if expected else len(said) == 1 and f"no NCCL for GPUs ({config})" in said[0]


def test_what_make_mesh_initialises_for_gpus_waits_as_nccl_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []

    def initialise(backend: str, timeout: timedelta | None) -> None:
        given.append((backend, timeout))
        raise KeyboardInterrupt

    nccls = timedelta(minutes=10)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(mesh, "initialise", initialise)
    monkeypatch.setattr(Cuda, "timeout", nccls)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for is_gpu, timeout in ((True, None), (True, 70), (False, None)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_gpu=is_gpu: is_gpu)
        with pytest.raises(KeyboardInterrupt):
            make_mesh(timeout=timeout)
    both = "cpu:gloo,cuda:nccl"
    assert given == [(both, nccls), (both, timedelta(seconds=70)), ("gloo", None)]


class _Ranks:
    """Ranks with given GPUs; each rank's message is made by the real function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[str, int]]) -> None:
        self._texts: list[str] = []
        for rank, (uuid, size) in enumerate(gpus):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            self.gpu = SimpleNamespace(uuid=uuid, total_memory=size)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: self.gpu)
            this: Any = SimpleNamespace(ranks=len(gpus), device_type="cuda", inter=None, intra=None)
            with contextlib.suppress(ArgumentError):
                agree_on_gpus(this, SimpleNamespace(exchange_texts=self._add), _CUDA)  # type: ignore[arg-type]

    def _add(self, text: str) -> list[str]:
        self._texts.append(text)
        return self._texts

    def exchange_texts(self, text: str) -> list[str]:
        return [*self._texts, text]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("has_nccl", [True, False])
def test_ranks_agree_on_their_gpus(has_nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fcdp_compile.core.sharding.replicas.are_blocking", lambda topology, device: not has_nccl
    )
    topology: Any = SimpleNamespace(ranks=2, device_type="cuda")
    some: Any = _Ranks(monkeypatch, [("a", 80), ("b", 40)])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: pytest.fail("a CPU"))
    assert agree_on_gpus(topology, some, _CPU) == 40  # and a rank whose model is not on its GPU
    same: Any = _Ranks(monkeypatch, [("a", 80), ("a", 80)])
    if has_nccl:
        with pytest.raises(ValueError, match=r"2 ranks use one GPU \(a\).*torch.cuda.set_device"):
            agree_on_gpus(topology, same, _CPU)
    else:
        assert agree_on_gpus(topology, same, _CPU) == 80
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: same.gpu)
    echo: Any = SimpleNamespace(exchange_texts=lambda text: [text, text])
    assert agree_on_gpus(topology, echo, _CUDA) == 80, "one rank that hears itself"
    topology.device_type = "cpu"
    assert agree_on_gpus(topology, pytest.fail, _CPU) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("version", "warns"), [("2.11.0+cu128", True), ("2.12.1", False)])
def test_torch_that_passes_over_our_operations_is_named(
    version: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    warn_of_torch()
    assert ("use torch 2.12 or newer" in caplog.text) is warns
