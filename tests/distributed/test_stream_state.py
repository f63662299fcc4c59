"""`stream_state` yields the tensors of `save_pretrained`'s files, bit by bit, one bucket at a time."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

import fcdp_compile
from fcdp_compile.core.params.home_shard import HomeShard
from fcdp_compile.errors import ArgumentError, FcdpError
from tests.distributed.beside import named, whole
from tests.distributed.exports import (
    ADAPTED,
    MODELS,
    PROMPTS,
    ids,
    llama,
    make,
    rank,
    saved,
    shared_folder,
    tensors_of,
    train,
)
from tests.distributed.jobs import WORKS, Job, asked, message_of, run_jobs
from tests.distributed.models import Odd
from tests.distributed.ranks import run
from tests.distributed.rollout import Engine, engine
from tests.quantised.layers import LAYERS

pytestmark = pytest.mark.distributed

SMALL = 9000
"""Bytes of a bucket; embeddings and stacked experts are larger."""


def _taken(model: Any, **options: Any) -> tuple[dict[str, Tensor], int]:
    """All tensors, and the number of buckets; at any time only one bucket's tensors are in memory."""
    found: dict[str, Tensor] = {}
    before: list[StorageWeakRef] = []
    count = 0
    for bucket in fcdp_compile.stream_state(model, bucket_bytes=SMALL, **options):
        assert all(ref.expired() for ref in before)
        before = [StorageWeakRef(tensor.untyped_storage()) for _, tensor in bucket]
        storages = {ref.cdata for ref in before}
        assert len(bucket) <= 1 or len(storages) < len(bucket) or _size(bucket) <= SMALL
        found |= {name: tensor.clone() for name, tensor in bucket}
        count += 1
    return found, count


def _size(bucket: list[tuple[str, Tensor]]) -> int:
    return sum(tensor.nbytes for _, tensor in bucket)


def _same(found: dict[str, Tensor], folder: Path) -> None:
    """Names, dtypes and values are those in the files in a folder."""
    files = {name.partition(": ")[2]: t for name, t in tensors_of(folder).items()}
    assert sorted(found) == sorted(files)
    for name, tensor in found.items():
        assert tensor.dtype == files[name].dtype, name
        assert torch.equal(tensor, files[name]), name


def _model(mesh: DeviceMesh | None, name: str) -> None:
    """After training, two ranks ask and get equal tensors; the others get as many empty buckets."""
    folder, plain = shared_folder(mesh), make(MODELS[name])
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh)
    train(model, plain)
    on = (0,) if mesh is None else (0, 3)
    found, count = _taken(model, on=on)
    assert count > 4
    if rank() == 0:
        saved(plain, folder)
    if mesh is not None:
        dist.barrier()
    if rank() in on:
        _same(found, folder)
    else:
        assert found == {}


def _adapter(mesh: DeviceMesh | None, name: str) -> None:
    """The adapters alone, and the base with them merged into it; the model stays as it is."""
    folder, plain = shared_folder(mesh), make(ADAPTED[name])
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh)
    train(model, plain)
    adapters, _ = _taken(model, only="adapters")
    merged, _ = _taken(model)
    for n, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), named(plain, n)), n
    if rank() == 0:
        _same(adapters, saved(plain, folder / "adapters"))
        _same(merged, saved(copy.deepcopy(plain).merge_and_unload(), folder / "merged"))
    else:
        assert adapters == merged == {}


def _plain_module(mesh: DeviceMesh | None) -> None:
    """The names of the state dict, both of a tie; odd sizes; a buffer."""
    plain = make(Odd)
    plain.register_buffer("steps", torch.tensor(7))
    plain.again = plain.embedding
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh)
    found, _ = _taken(model)
    if rank() == 0:
        assert set(found) == set(plain.state_dict())
        assert all(torch.equal(found[n], t) for n, t in plain.state_dict().items())


def _compiled(mesh: DeviceMesh) -> None:
    """Within no_sync, and between forward and backward, values are right and training is undisturbed.

    Of the base, nothing crosses between nodes that is cached, and nothing ever for adapters alone.
    """
    plain = make(ADAPTED["lora"])
    lora = sum(p.nbytes for n, p in plain.named_parameters() if "lora_" in n)
    base = sum(p.nbytes for p in plain.parameters()) - lora
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh)
    net: Any = torch.compile(model, backend="fcdp")
    expected = copy.deepcopy(plain).merge_and_unload().state_dict()

    def crossed(only: str) -> int:
        before = fcdp_compile.traffic(model).total.bytes("inter", "all_gather")
        found, _ = _taken(net, only=only)
        if rank() == 0 and only == "all":
            assert all(torch.equal(t, expected[n]) for n, t in found.items())
        sent: int = fcdp_compile.traffic(model).total.bytes("inter", "all_gather") - before
        return sent

    # Each rank sends its part, a fourth, to the other node; sizes that ranks do not divide are padded.
    adapters, merged = crossed("adapters"), crossed("all")
    assert lora / 4 <= adapters < lora / 4 * 1.2
    assert (base + lora) / 4 <= merged < (base + lora) / 4 * 1.2
    for waits in (fcdp_compile.no_sync, nullcontext):
        with waits(model):
            loss = net(input_ids=ids(), labels=ids()).loss
            # In this step the cache has copies of the adapters, too.
            assert crossed("all") == 0
            loss.backward()
        plain(input_ids=ids(), labels=ids()).loss.backward()
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    for n, p in trained:
        assert p.grad is not None
        torch.testing.assert_close(whole(p.grad), named(plain, n).grad, msg=n)
    for mine in (model, plain):
        parameters = [p for p in mine.parameters() if p.requires_grad]
        torch.optim.SGD(parameters, lr=0.1).step()
    values = {n: whole(p) for n, p in trained}
    plain.load_state_dict(values, strict=False)
    expected = plain.merge_and_unload().state_dict()
    assert crossed("adapters") == crossed("all") == adapters


def _refusals(mesh: DeviceMesh | None) -> None:
    model = fcdp_compile.shard(make(llama), mesh)
    last = 0 if mesh is None else 3
    stream = partial(fcdp_compile.stream_state, model)
    for told, error, options in (
        ("only must be 'adapters' or 'all', not 'lora'", ArgumentError, {"only": "lora"}),
        (f"from 0 to {last}, not (4,)", ArgumentError, {"on": (4,)}),
        (f"from 0 to {last}, not 0", ArgumentError, {"on": 0}),
        ("a positive whole number, not 0", ArgumentError, {"bucket_bytes": 0}),
        ("or None, not torch.int8", ArgumentError, {"dtype": torch.int8}),
        ("LlamaForCausalLM has none; use only='all'", FcdpError, {"only": "adapters"}),
    ):
        found = message_of(error, partial(stream, **options))
        assert told in found, found
    with fcdp_compile.gathered(model):
        assert "leave the block first" in message_of(FcdpError, stream)
    with torch.device("meta"):
        empty = llama()
    empty = fcdp_compile.shard(empty, mesh)
    assert "stream_state needs the values of" in message_of(
        FcdpError, partial(fcdp_compile.stream_state, empty)
    )
    for kind in PROMPTS:
        prompts = fcdp_compile.shard(make(ADAPTED[kind]), mesh)
        found = message_of(FcdpError, partial(fcdp_compile.stream_state, prompts))
        assert "only='adapters'" in found, found
        found = message_of(FcdpError, partial(fcdp_compile.stream_state, prompts, only="adapters"))
        assert "cannot be streamed" in found, found


def _ranks_disagree(mesh: DeviceMesh) -> None:
    """All ranks raise the same sentence."""
    model = fcdp_compile.shard(make(ADAPTED["lora"]), mesh)
    only = "adapters" if rank() == 2 else "all"
    found = message_of(ArgumentError, partial(fcdp_compile.stream_state, model, only=only))
    assert "ranks 0 and 2 ask fcdp_compile.stream_state for different things: only='all'" in found
    changes = rank() == 3
    found = message_of(ArgumentError, partial(fcdp_compile.stream_state, model, changes=changes))
    assert "ranks 0 and 3 ask" in found, found
    alone = {"bucket_bytes": -1} if rank() == 1 else {}
    found = message_of(ArgumentError, partial(fcdp_compile.stream_state, model, **alone))
    assert found == "rank 1: bucket_bytes must be a positive whole number, not -1"


def _no_rank_waits(mesh: DeviceMesh) -> None:
    """A rank that leaves the loop, or fails or steps in it, ends the loop of all, which can start another."""
    model = fcdp_compile.shard(make(llama), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts: list[int] = []
    kept: list[Any] = []

    def loop(on_second: Any) -> None:
        count = 0
        stream = fcdp_compile.stream_state(model, on=(0, 1), bucket_bytes=SMALL)
        kept.append(stream)  # whoever holds it does not go on with it
        for _ in stream:
            if (count := count + 1) == 2 and on_second():
                break
        counts.append(count)

    def fail() -> bool:
        if rank() == 0:
            raise OSError("the engine is gone")
        return False

    found = message_of(FcdpError, partial(loop, lambda: rank() == 1))
    if rank() == 1:
        assert found == "nothing was raised"
    else:
        assert "rank 1: left the loop over fcdp_compile.stream_state before its end" in found, found
    found = message_of((OSError, FcdpError), partial(loop, fail))  # type: ignore[arg-type]  # two
    assert ("the engine is gone" if rank() == 0 else "rank 0: left the loop") in found, found
    assert "an optimizer has stepped" in message_of(FcdpError, partial(loop, optimizer.step))
    loop(lambda: True)
    assert counts[-1] == 2
    loop(lambda: False)
    assert counts[-1] > 4

    def closed(*ranks: int) -> None:
        stream = fcdp_compile.stream_state(model)
        if rank() in ranks:
            stream.close()
        else:
            list(stream)

    found = message_of(FcdpError, partial(closed, 1))
    assert ("closed a stream" in found) == (rank() != 1), found
    closed(*range(dist.get_world_size()))
    loop(lambda: False)


def _one_rank_fails(mesh: DeviceMesh) -> None:
    """A shard that has changed since: no rank waits for the rank that has it."""
    model = fcdp_compile.shard(make(llama), mesh)
    if rank() == 1:
        shard = named(model, "norm.weight")
        assert isinstance(shard, HomeShard)
        shard._local_tensor = shard.held.double()
    found = message_of(FcdpError, lambda: list(fcdp_compile.stream_state(model)))
    assert "rank 1: parameter 'model.norm.weight' is now torch.float64" in found, found


def _changes(mesh: DeviceMesh) -> None:
    """A receiver gets the few bits that AdamW changes in bf16, or whole tensors if its own are unsure."""
    model = fcdp_compile.shard(make(llama), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    stream_bf16 = partial(fcdp_compile.stream_state, model, dtype=torch.bfloat16)
    receiver: dict[str, Tensor] = {}

    def take(on: int = 0, leaves: int | None = None) -> int:
        """After a step, take the stream; returns the number of whole tensors, 0 on ranks that do not ask."""
        model(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stream = stream_bf16(on=(on,), bucket_bytes=SMALL, changes=True)
        wholes = sent = 0
        for bucket in stream:
            if rank() == leaves:
                raise OSError("the engine is gone")
            for name, item in bucket:
                if isinstance(item, Tensor):
                    receiver[name], wholes, sent = item, wholes + 1, sent + item.nbytes
                else:
                    receiver[name].view(-1)[item.indices] = item.values
                    sent += item.indices.nbytes + item.values.nbytes
        stream.acknowledge()
        expected = {name: tensor for bucket in stream_bf16(on=(on,)) for name, tensor in bucket}
        for name, tensor in expected.items():
            assert torch.equal(receiver[name].view(torch.int16), tensor.view(torch.int16)), name
        if rank() == on and not wholes:
            assert sent < sum(tensor.nbytes for tensor in expected.values()) / 2
        return wholes

    with torch.inference_mode():
        for _ in stream_bf16(changes=True):
            pass
    count = take()
    assert (count > 4) == (rank() == 0)
    assert take() == take() == 0
    for others in (partial(take, on=3), partial(take, leaves=0), partial(take, leaves=1)):
        found = message_of((OSError, FcdpError), others)  # type: ignore[arg-type]  # two
        assert ("nothing" in found) == ("on" in others.keywords)
        assert take() == count, "the last stream has not told this receiver everything"
        assert take() == 0


ANYWHERE: dict[str, Job] = {
    "a plain module": _plain_module,
    "refusals": _refusals,
}
JOBS: dict[str, Job] = {
    **{f"model {n}": partial(_model, name=n) for n in ("llama_tied", "mixtral", "bert")},
    **{f"adapter {n}": partial(_adapter, name=n) for n in ("lora", "dora", "embedding")},
    **ANYWHERE,
    "within compiled training": _compiled,
    "changes": _changes,
    "ranks disagree": _ranks_disagree,
    "no rank waits": _no_rank_waits,
    "one rank fails": _one_rank_fails,
}


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_jobs(asked(request, JOBS), nodes=2, ranks_per_node=2)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.slow
def test_on_two_nodes(verdicts: list[dict[str, str]], job: str) -> None:
    assert [v[job] for v in verdicts] == [WORKS] * 4


@pytest.mark.parametrize("job", ["model mixtral", "adapter lora", *ANYWHERE])
def test_in_one_process(job: str) -> None:
    JOBS[job](None)  # type: ignore[arg-type]  # there is no mesh


def _rollouts(mesh: DeviceMesh, address: str, folder: Path) -> None:
    """After each step the engine gets the weights, compares them, and computes the trained model's logits."""
    to = Engine(address) if rank() == 0 else None
    for kind, build in (("all", llama), ("adapters", ADAPTED["lora"])):
        plain = make(build)
        model = fcdp_compile.shard(copy.deepcopy(plain), mesh)
        for step in range(2):
            train(model, plain)
            stream = fcdp_compile.stream_state(model, only=kind, bucket_bytes=SMALL)
            if to is None:
                assert not any(stream)
                continue
            at = saved(plain, folder / f"{kind}{step}")
            file = "model.safetensors" if kind == "all" else "adapter_model.safetensors"
            verdict, logits = to.load(kind, stream, at / file)
            assert verdict == "equal"
            with torch.no_grad():
                torch.testing.assert_close(logits.cpu(), plain(input_ids=ids()).logits.cpu())
    dist.barrier()


@pytest.mark.slow
def test_a_rollout_engine_gets_the_trained_weights(tmp_path: Path) -> None:
    with engine(tmp_path) as address:
        run(_rollouts, address, tmp_path, nodes=2, ranks_per_node=2)


def test_a_quantised_base_is_refused() -> None:
    pytest.importorskip("bitsandbytes")
    model = fcdp_compile.shard(nn.Sequential(LAYERS["nf4"]()))
    with pytest.raises(FcdpError, match="is quantised, and fcdp streams no quantised weights"):
        fcdp_compile.stream_state(model)
