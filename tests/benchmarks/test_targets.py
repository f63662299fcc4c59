from __future__ import annotations

import pytest

from benchmarks.reporting.rows import ResultRow
from benchmarks.reporting.summary import summarise
from benchmarks.reporting.targets import TargetVerdict, judge
from builders_bench import make_row


def verdict(rows: list[ResultRow], part: str) -> TargetVerdict:
    (found,) = [v for v in judge(summarise(rows)) if part in v.target]
    return found


@pytest.mark.parametrize(("seconds", "text"), [(1.04, "met"), (1.26, "missed by 20 %")])
def test_lora_hardly_notices_the_network(seconds: float, text: str) -> None:
    rows = [
        make_row("ddp", "lora", network="unlimited"),
        make_row("fcdp", "lora", network="unlimited", step_s=[1.0]),
        make_row("fcdp", "lora", network="100mbit", step_s=[seconds]),
    ]
    found = verdict(rows, "against its own")
    assert found.found == pytest.approx(seconds)
    assert found.text == text


@pytest.mark.parametrize(("sent", "text"), [(100_000_000, "met"), (150_000_000, "missed by 50 %")])
def test_a_third_of_the_bytes(sent: int, text: str) -> None:
    rows = [make_row("ddp"), make_row("fcdp", sent_bytes=sent)]
    rows.append(make_row("fsdp2", sent_bytes=300_000_000))
    found = verdict(rows, "bytes sent")
    assert found.text == text


def test_the_lower_bound_is_the_larger_of_compute_and_network() -> None:
    # 100 MB take 8 s at 100 Mbit/s.
    by_network = [make_row("ddp"), make_row("fcdp", step_s=[8.8], compute_s=1.0)]
    assert verdict(by_network, "max(compute").found == pytest.approx(1.1)
    by_compute = [make_row("ddp"), make_row("fcdp", step_s=[24.0], compute_s=20.0)]
    assert verdict(by_compute, "max(compute").found == pytest.approx(1.2)


def test_accumulated_compute_counts_each_micro_batch() -> None:
    rows = [make_row(s, accumulation=8, step_s=[20.0], compute_s=2.0) for s in ("ddp", "fcdp")]
    assert verdict(rows, "max(compute").found == pytest.approx(20 / 16)


def test_the_fastest_peer_of_equal_memory_counts_and_no_other() -> None:
    rows = [
        make_row("ddp", step_s=[1.0]),
        make_row("hsdp", step_s=[1.0]),
        make_row("fcdp", step_s=[3.0]),
        make_row("fcdp-zero3", step_s=[1.0]),
        make_row("fsdp2", step_s=[9.0]),
        make_row("ds-hpz", step_s=[2.0]),
    ]
    found = verdict(rows, "shards over all ranks too")
    assert found.found == pytest.approx(1.5)
    assert "DeepSpeed ZeRO-3 + hpZ; 4 of 6 peers not measured" in found.detail


def test_wrong_losses_win_nothing() -> None:
    rows = [make_row("ddp"), make_row("fsdp2"), make_row("fcdp", step_s=[0.1], losses=[1, 1, 1])]
    found = verdict(rows, "100 Mbit/s against FSDP2's")
    assert found.found is None
    assert found.text == "not measured"
    control = [*rows[:2], make_row("fcdp", step_s=[0.1])]
    assert any(v.text == "met" for v in judge(summarise(control)))
