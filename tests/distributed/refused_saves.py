"""Jobs in which saving is refused and leaves the folder as it was; what the refusals name works."""

from __future__ import annotations

import errno
import os
import resource
import signal
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file, save_model
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fcdp_compile
from fcdp_compile.core.params.home_shard import HomeShard
from fcdp_compile.errors import FcdpError
from tests.distributed.beside import named
from tests.distributed.exports import (
    compare,
    llama,
    make,
    rank,
    shared_folder,
)
from tests.distributed.jobs import message_of
from tests.distributed.models import Odd


def disk_full(mesh: DeviceMesh | None) -> None:
    """The third file of four cannot be written; no rank hangs, and the folder is unchanged."""
    folder = shared_folder(mesh)
    model = fcdp_compile.shard(make(llama), mesh)
    fcdp_compile.save_pretrained(model, folder / "ours")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    before = {p.name: p.read_bytes() for p in (folder / "ours").iterdir()}
    if rank() == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    for limit in (10**9, 9000):
        save = partial(fcdp_compile.save_pretrained, model, folder / "ours", max_shard_bytes=limit)
        told = message_of(FcdpError, save)
        assert os.strerror(errno.EFBIG) in told, told
    dist.barrier()
    if rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert before == {p.name: p.read_bytes() for p in (folder / "ours").iterdir()}
    fcdp_compile.save_pretrained(model, folder / "ours")


def no_folder(mesh: DeviceMesh | None) -> None:
    folder = shared_folder(mesh)
    (folder / "file").write_text("")
    model = fcdp_compile.shard(make(llama), mesh)
    for name in ("file", "file/below"):
        told = message_of(FcdpError, partial(fcdp_compile.save_pretrained, model, folder / name))
        assert "file" in told


def one_rank_fails(mesh: DeviceMesh) -> None:
    """A rank whose shard has changed sends zeros, and no rank keeps them."""
    folder = shared_folder(mesh)
    model = fcdp_compile.shard(make(llama), mesh)
    if rank() == 1:
        shard = named(model, "norm.weight")
        assert isinstance(shard, HomeShard)
        shard._local_tensor = shard.held.double()
    told = message_of(FcdpError, partial(fcdp_compile.save_pretrained, model, folder / "new"))
    assert "rank 1: parameter 'model.norm.weight' is now torch.float64" in told, told
    dist.barrier()
    assert os.listdir(folder) == []


def others_ask_for_another(mesh: DeviceMesh) -> None:
    folder = shared_folder(mesh)
    model = fcdp_compile.shard(make(llama), mesh)
    size = 10**9 if rank() == 0 else 9000
    save = partial(fcdp_compile.save_pretrained, model, folder / "new", max_shard_bytes=size)
    assert "ranks 0 and 1 are about to export different tensors" in message_of(FcdpError, save)


def values_that_are_not_there(mesh: DeviceMesh | None) -> None:
    folder = shared_folder(mesh)
    with torch.device("meta"):
        model = llama()
    model = fcdp_compile.shard(model, mesh)
    told = message_of(FcdpError, partial(fcdp_compile.save_pretrained, model, folder / "new"))
    assert "materialize" in told, told


class _OwnFormat(Odd):
    def save_pretrained(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder / "odd.pt")


def own_methods(mesh: DeviceMesh) -> None:
    """Libraries' own save methods write whole values, or name a method that does."""
    folder = shared_folder(mesh)
    model = fcdp_compile.shard(make(llama), mesh)
    for told, save in {
        "not push_to_hub or variant; leave": partial(
            model.save_pretrained, folder, push_to_hub=True, variant="x"
        ),
        "not state_dict; leave": partial(
            model.save_pretrained, folder, state_dict=model.state_dict()
        ),
        "_OwnFormat has a save_pretrained of its own": partial(
            fcdp_compile.shard(make(_OwnFormat), mesh).save_pretrained, folder
        ),
        "this rank alone cannot write the state dict": partial(
            save_file, model.state_dict(), folder / "f"
        ),
        "or write it within a block of fcdp_compile.gathered": partial(
            save_model, model, folder / "m"
        ),
    }.items():
        found = message_of(FcdpError, save)
        assert told in found, found
        assert "fcdp_compile.save_pretrained(model, folder)" in found, found
    found = message_of(FcdpError, partial(model.save_pretrained, folder, max_shard_size="much"))
    assert "'much'" in found, found
    dist.barrier()
    assert os.listdir(folder) == []

    def save_alone() -> None:
        if rank() == 0:
            model.save_pretrained(folder)
        else:
            model(input_ids=torch.ones(1, 4, dtype=torch.int64))

    found = message_of(FcdpError, save_alone)
    assert "rank 0 calls save_pretrained and rank 1 gathers parameter" in found, found
    assert "load and save on every rank" in found, found
    assert os.listdir(folder) == []

    fcdp_compile.save_pretrained(model, folder / "ours")
    torch.save(model.state_dict(), folder / f"{rank()}.pt")
    cut = torch.load(folder / f"{rank()}.pt")
    for name, parameter in model.named_parameters():
        assert type(cut[name]) is DTensor
        assert torch.equal(cut[name].to_local(), parameter.to_local())
    with fcdp_compile.gathered(model):
        if rank() == 0:
            model.save_pretrained(folder / "own")
            compare(folder / "own", folder / "ours")  # the order of tensors in the file may differ
            save_model(model, folder / "whole.safetensors")
            whole = load_file(folder / "whole.safetensors")
            assert all(torch.equal(whole[n], p) for n, p in model.named_parameters())
