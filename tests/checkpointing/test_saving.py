"""Save and load in one process: refusals, loaded values, and saves that go on beside training."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fcdp_compile
from checkpointing.small import Net, Small
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import CheckpointError, FcdpError
from fcdp_compile.models.checkpointing.contents import JobObjects as Given
from fcdp_compile.models.checkpointing.format.disk import Disk
from fcdp_compile.models.checkpointing.format.record import RECORD
from fcdp_compile.models.checkpointing.saving import save_on


def test_a_job_continues_bit_by_bit(tmp_path: Path) -> None:
    job, again = Small(1), Small(2)
    job.train(3)
    job.save(tmp_path)
    state = job.state()
    job.train(3)
    loaded = again.load(tmp_path)
    assert again.state() == state
    assert loaded.step == 1
    assert loaded.extra["seen"][1].tolist() == [1]
    again.train(3)
    assert again.state() == job.state()


def test_older_versions_can_read_the_record(tmp_path: Path) -> None:
    """Without ranks that share parameters, there is no field that they do not know."""
    Small(1).save(tmp_path)
    record = json.loads((tmp_path / RECORD).read_text())
    assert "tp" not in record
    assert not any("part_of" in tensor for tensor in record["tensors"])


def test_loading_again_is_loading_once(tmp_path: Path) -> None:
    job = Small(1)
    job.train(3)
    job.save(tmp_path)
    state = job.state()
    job.train(1)
    job.load(tmp_path)
    assert job.state() == state


@pytest.mark.parametrize("kind", ["sgd", "momentum", "rmsprop", "adagrad", "amsgrad", "none yet"])
def test_optimizers(tmp_path: Path, kind: str) -> None:
    makers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
        "adagrad": lambda p: torch.optim.Adagrad(p),
        "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, lr=torch.tensor(0.1), foreach=False),
        "none yet": lambda p: torch.optim.AdamW(p),
    }
    first, second = Small(1), Small(2)
    for job in (first, second):
        job.optimizer = makers[kind](job.model.parameters())
        job.scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 2)
    first.train(0 if kind == "none yet" else 2)
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.state() == first.state()
    first.train(2)
    second.load(tmp_path)
    second.train(2)
    assert second.state()["tensors"] == first.state()["tensors"]


def test_moments_keep_a_dtype_of_their_own(tmp_path: Path) -> None:
    job, again = Small(1), Small(2)
    for one in (job, again):
        one.train(1)
        for of_one in one.optimizer.state.values():
            of_one["exp_avg"] = of_one["exp_avg"].double() * 1.1
    job.save(tmp_path)
    again.load(tmp_path)
    assert again.state() == job.state()


def test_what_is_frozen_may_differ(tmp_path: Path) -> None:
    job, again = Small(1), Small(2)
    job.save(tmp_path)
    again.model.requires_grad_(False)
    fcdp_compile.load(tmp_path, model=again.model)
    assert torch.equal(again.model.first.weight, job.model.first.weight)
    assert not again.model.first.weight.requires_grad


def test_a_scaler_and_an_extra_state(tmp_path: Path) -> None:
    class Counting(Net):
        seen = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    def make() -> tuple[Any, torch.amp.GradScaler]:
        return fcdp_compile.shard(Counting()), torch.amp.GradScaler("cpu", init_scale=8.0)

    model, scaler = make()
    model.seen = 7
    scaler.scale(torch.tensor(1.0))
    scaler.update(3.0)
    fcdp_compile.save(tmp_path, model=model, scaler=scaler)
    other, fresh = make()
    fcdp_compile.load(tmp_path, model=other, scaler=fresh)
    assert other.seen == 7
    assert fresh.get_scale() == 3.0


def test_a_model_from_meta(tmp_path: Path) -> None:
    job = Small(1)
    job.save(tmp_path)
    with torch.device("meta"):
        model = Net()
    fcdp_compile.shard(model)
    with pytest.raises(FcdpError, match=r"has none yet"):
        fcdp_compile.save(tmp_path / "other", model=model)
    fcdp_compile.load(tmp_path, model=model)
    for name, value in job.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    model(torch.rand(2, 3))
    fcdp_compile.save(tmp_path / "other", model=model)


class Renamed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.second = self.norm
        self.norm = nn.Identity()  # type: ignore[assignment]


def test_another_model_is_refused_with_all_differences(tmp_path: Path) -> None:
    Small(1).save(tmp_path)
    other = fcdp_compile.shard(Renamed())
    before = {n: v.clone() for n, v in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"the model differs from the checkpoint") as caught:
        fcdp_compile.load(tmp_path, model=other)
    for told in (
        "model.norm.weight is not in the model",
        "model.second.weight is missing in the checkpoint",
        "model.norm.running_mean (buffer) is not in the model",
        "model.first.weight is float32 (5, 3) in the checkpoint, and here torch.float32 (6, 3)",
    ):
        assert told in str(caught.value)
    assert all(torch.equal(v, before[n]) for n, v in other.state_dict().items())
    double = fcdp_compile.shard(Net().double())
    with pytest.raises(CheckpointError, match=r"float32"):
        fcdp_compile.load(tmp_path, model=double)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    job, again = Small(1), Small(2)
    job.train(1)
    job.save(tmp_path)
    before = again.state()
    of_some = torch.optim.AdamW(again.model.first.parameters())
    with pytest.raises(CheckpointError, match=r"group 0 .* lacks"):
        fcdp_compile.load(tmp_path, model=again.model, optimizer=of_some)
    groups = [{"params": [p]} for p in again.model.parameters()]
    with pytest.raises(CheckpointError, match=r"has 5 groups of parameters and the checkpoint 1"):
        fcdp_compile.load(tmp_path, model=again.model, optimizer=torch.optim.AdamW(groups))
    adam = torch.optim.Adam(again.model.parameters())
    with pytest.raises(CheckpointError, match=r"optimizer is Adam, but .* was saved with AdamW"):
        fcdp_compile.load(tmp_path, model=again.model, optimizer=adam)
    with pytest.raises(CheckpointError, match=r"saved without a scaler"):
        fcdp_compile.load(tmp_path, model=again.model, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(CheckpointError, match=r"not the model's"):
        fcdp_compile.save(tmp_path, model=again.model, optimizer=job.optimizer)
    with pytest.raises(CheckpointError, match=r"has no extra\['data'\]"):
        fcdp_compile.load(tmp_path, model=again.model, extra={"data": job.scheduler})
    assert again.state() == before


def test_parameters_in_another_order_keep_their_state_and_their_names(tmp_path: Path) -> None:
    job = Small(1)
    named = list(job.model.named_parameters())
    job.optimizer = torch.optim.AdamW(named)
    job.train(2)
    job.save(tmp_path)
    turned = torch.optim.AdamW(named[::-1])
    fcdp_compile.load(tmp_path, model=job.model, optimizer=turned)
    (group,) = turned.param_groups
    names = {p: name for name, p in named}
    assert group["param_names"] == [names[p] for p in group["params"]]
    for _, parameter in named:
        of_one = turned.state[parameter]
        assert torch.equal(of_one["exp_avg"], job.optimizer.state[parameter]["exp_avg"])


def test_a_load_that_fails_while_it_writes_says_so_and_makes_caches_stale(tmp_path: Path) -> None:
    class Unwilling(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise RuntimeError("not today")

    job = Small(1)
    job.save(tmp_path)
    state = state_of(job.model)
    before = state.validity.generations.of(state.records)
    job.scheduler = Unwilling(job.optimizer, 2)
    with pytest.raises(CheckpointError, match=r"not today; the model .* may now hold a part of"):
        job.load(tmp_path)
    assert state.validity.generations.of(state.records) > before


def test_an_expanded_buffer(tmp_path: Path) -> None:
    model = Net()
    model.register_buffer("same", torch.ones(1).expand(3))
    fcdp_compile.save(tmp_path, model=fcdp_compile.shard(model))
    other = Net()
    other.register_buffer("same", torch.zeros(1).expand(3))
    fcdp_compile.load(tmp_path, model=fcdp_compile.shard(other))
    assert other.get_buffer("same").tolist() == [1, 1, 1]


def test_a_layer_that_is_compiled_by_itself_keeps_its_names(tmp_path: Path) -> None:
    job, again = Small(1), Small(2)
    job.model.first = torch.compile(job.model.first, backend="eager")
    job.train(1)
    job.save(tmp_path)
    again.load(tmp_path)
    for parameter, other in zip(job.model.parameters(), again.model.parameters(), strict=True):
        found, wanted = again.optimizer.state[other], job.optimizer.state[parameter]
        assert torch.equal(found["exp_avg"], wanted["exp_avg"])


def test_whole_parameters_are_neither_saved_nor_loaded(tmp_path: Path) -> None:
    model = fcdp_compile.shard(nn.Linear(2, 2))
    fcdp_compile.save(tmp_path, model=model)
    with fcdp_compile.gathered(model):
        for act in (fcdp_compile.save, fcdp_compile.load):
            with pytest.raises(CheckpointError, match=r"'weight' is whole; save and load outside"):
                act(tmp_path, model=model)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    job = Small(1)
    with pytest.raises(CheckpointError, match=r"extra\['loss'\] is a builtins.set"):
        fcdp_compile.save(tmp_path, model=job.model, extra={"loss": {1}})
    with pytest.raises(CheckpointError, match=r"step must be a whole number, not 1.5"):
        fcdp_compile.save(tmp_path, model=job.model, step=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not sharded"):
        fcdp_compile.save(tmp_path, model=nn.Linear(1, 1))
    with (
        fcdp_compile.no_sync(job.model),
        pytest.raises(CheckpointError, match=r"lose the gradients that accumulate"),
    ):
        fcdp_compile.save(tmp_path, model=job.model)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write to .*file"):
        fcdp_compile.save(tmp_path / "file", model=job.model)
    with pytest.raises(CheckpointError, match=r"no checkpoint in it"):
        fcdp_compile.load(tmp_path, model=job.model)


class Slow(Disk):
    """A disk that writes once it may."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def reached(self, point: str) -> None:
        assert self.may.wait(300)


def _given(job: Small) -> Given:
    return Given(optimizer=job.optimizer, scheduler=job.scheduler, scaler=None, extra=job.extra)


def test_training_goes_on_beside_a_save_and_changes_nothing_in_it(tmp_path: Path) -> None:
    job, again, disk = Small(1), Small(2), Slow()
    job.train(2)
    wanted = job.state()
    pending = save_on(disk, tmp_path, job.model, _given(job), 7, asynchronous=True)
    assert not pending.done
    job.train(3)
    job.extra["seen"][1].fill_(99)
    assert not list(tmp_path.glob("*"))
    disk.may.set()
    pending.wait()
    assert pending.done
    assert again.load(tmp_path).extra["seen"][1].tolist() == [1]
    assert again.state() == wanted


def test_a_save_goes_where_the_process_was_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, disk = Small(1), Slow()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    pending = save_on(disk, Path("a b"), job.model, _given(job), 1, asynchronous=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    disk.may.set()
    pending.wait()
    assert Small(2).load(tmp_path / "a b").step == 1


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    job, disk = Small(1), Slow()
    pending = save_on(disk, tmp_path / "a", job.model, _given(job), 1, asynchronous=True)
    threading.Timer(0.2, disk.may.set).start()
    job.save(tmp_path / "b")
    assert pending.done
    assert Small(2).load(tmp_path / "a").step == 1


def test_what_failed_beside_training_is_raised_by_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(Disk):
        def reached(self, point: str) -> None:
            raise OSError(28, "No space left on device")

    job = Small(1)
    pending = save_on(Full(), tmp_path, job.model, _given(job), 1, asynchronous=True)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"No space left on device"):
            pending.wait()
    assert "No space left" in caplog.text, "whoever does not wait hears of it too"
    job.save(tmp_path)  # the next save works
    assert Small(2).load(tmp_path).step == 1


def test_the_interpreter_waits_for_a_save(tmp_path: Path) -> None:
    script = """
        import sys, time
        from pathlib import Path
        from checkpointing.small import Small
        from fcdp_compile.models.checkpointing.contents import JobObjects
        from fcdp_compile.models.checkpointing.format.disk import Disk
        from fcdp_compile.models.checkpointing.saving import save_on

        class Late(Disk):
            def reached(self, point):
                time.sleep(0.02)

        job = Small(1)
        given = JobObjects(optimizer=None, scheduler=None, scaler=None, extra=None)
        save_on(Late(), Path(sys.argv[1]), job.model, given, 5, asynchronous=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    tests = str(Path(__file__).parent.parent)
    subprocess.run(command, check=True, timeout=600, env={"PYTHONPATH": tests, "PATH": ""})
    assert fcdp_compile.load(tmp_path, model=Small(2).model).step == 5


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Small(1)
    fcdp_compile.save(tmp_path, model=job.model, progress=True)
    fcdp_compile.load(tmp_path, model=job.model, progress=True)
    told = capsys.readouterr().err
    assert "saving: 100%" in told
    assert "loading: 100%" in told
