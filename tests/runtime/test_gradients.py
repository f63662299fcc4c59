"""Accumulated gradients: sums, clearing, failures; in real backwards of autograd, on real lanes."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

from fcdp_compile.errors import FcdpError
from fcdp_compile.plan import Tier
from fcdp_compile.torch_compat.autograd import backward_number
from tests.runtime.accumulating_rank import HELD_BYTES, NAMES, SLOTS, GradientsOf, Rank

both = pytest.mark.parametrize("tier", [Tier.GPU, Tier.HOST])


def _only(number: int) -> list[bool]:
    """Flags with only one set."""
    return [i == number for i in range(2 * len(NAMES))]


class TestSums:
    """Sums over several micro-batches."""

    @both
    def test_every_micro_batch_counts_once(self, tier: Tier) -> None:
        rank = Rank(tier)
        for _ in range(2):
            rank.accumulate(1, 10)
            rank.check(0)
            assert all(torch.all(rank.grad(n).signbit()) for n in NAMES)
            rank.synchronise(100)
            rank.check(111)
            rank.clear(*NAMES, set_to_none=True)

    @both
    def test_alone_a_synchronising_one_is_as_ever(self, tier: Tier) -> None:
        rank = Rank(tier)
        rank.synchronise(3)
        rank.synchronise(4)
        rank.check(7)
        assert rank.peers.agreed == rank.pool.slab_bytes == 0

    @both
    def test_gradients_that_were_synchronised_before_stay(self, tier: Tier) -> None:
        rank = Rank(tier)
        rank.synchronise(3)
        rank.accumulate(1)
        rank.check(3)
        rank.synchronise(4)
        rank.check(8)

    @both
    def test_sums_are_wider_than_what_travels(self, tier: Tier) -> None:
        """256 + 1 + 1 is 256 in bfloat16 at every step."""
        rank = Rank(tier, reduces=("bfloat16", 2))
        rank.accumulate(256, 1)
        rank.synchronise(1)
        rank.check(258)

    def test_bytes_are_those_that_go_to_the_host_and_back(self) -> None:
        rank = Rank(Tier.HOST)
        rank.accumulate(1, 2)
        rank.synchronise(3)
        assert rank.counters.sent == {"collect": 2 * HELD_BYTES, "accumulate": 2 * HELD_BYTES}
        assert rank.counters.calls == {"collect": 3, "accumulate": 2}
        on_gpu = Rank(Tier.GPU)
        on_gpu.accumulate(1, 2)
        on_gpu.synchronise(3)
        assert on_gpu.counters.sent == {"collect": 0, "accumulate": 0}
        assert on_gpu.counters.calls == rank.counters.calls

    def test_slabs_are_used_again(self) -> None:
        rank = Rank(Tier.HOST)
        for _ in range(3):
            rank.accumulate(1, 2)
            rank.synchronise(3)
            assert rank.pool.slab_bytes == mmap.PAGESIZE
        on_gpu = Rank(Tier.GPU)
        on_gpu.accumulate(1)
        assert on_gpu.pool.slab_bytes == 0

    @both
    def test_what_waits_is_nobody_elses(self, tier: Tier) -> None:
        """Gradients that no lane has made may belong to the user."""
        rank = Rank(tier)
        bucket = rank.buckets[0]
        own = torch.ones(2 * bucket.slot_elements)

        def run() -> list[Tensor]:
            rank.accumulation.begin_graph(backward_number(), accumulates=True)
            total = rank.accumulation.collect(rank.bound[bucket.id], NAMES, own, torch.float32)
            rank.accumulation.accumulate(rank.bound[bucket.id], NAMES, total).wait()
            return [torch.full_like(rank.records[n].parameter, -0.0) for n in NAMES]

        GradientsOf.apply(run, *[rank.records[n].parameter for n in NAMES]).backward()
        own.fill_(7)
        rank.synchronise(1)
        rank.check(2)

    @both
    def test_what_the_last_micro_batch_does_not_use_is_reduced_at_its_end(self, tier: Tier) -> None:
        rank = Rank(tier, reduces=("bfloat16", 2))
        rank.accumulate(256, 1)
        rank.loss(5, accumulates=False, bucket=1).backward()
        rank.check(256)  # 257 in the reduce dtype
        on_host = (
            2 * HELD_BYTES if tier is Tier.HOST else 0
        )  # that of the second micro-batch, and this one
        assert rank.counters.sent["collect"] == on_host
        assert not rank.accumulation.waits_for([rank.bound[0], rank.bound[1]])
        assert rank.accumulation.settle() == []


class TestClearing:
    """Clearing `.grad` clears accumulated gradients, too."""

    @both
    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("had", [None, 0.0, 5.0])
    def test_all(self, tier: Tier, set_to_none: bool, had: float | None) -> None:
        """had: the value of `.grad` before."""
        rank = Rank(tier)
        # All that is gone here, and "tiny" too.
        rank.peers.say = lambda flags: [flags[0]] * len(NAMES) + [False] * len(NAMES)
        if had is not None:
            rank.synchronise(had)
        rank.accumulate(1)
        rank.clear(*NAMES, set_to_none=set_to_none)
        assert rank.accumulation.settle() == []
        assert not rank.accumulation.waits_for([rank.bound[0]])
        for _ in range(2):  # first from negative zeros, then from positive zeros
            rank.accumulate(10)
            rank.clear(*NAMES, set_to_none=set_to_none)
        rank.accumulate(20)
        rank.synchronise(100)
        rank.check(120)

    @both
    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("name", ["w", "s"])
    def test_some_of_a_bucket(self, tier: Tier, set_to_none: bool, name: str) -> None:
        rank = Rank(tier)
        rank.synchronise(5)
        rank.accumulate(1)
        rank.clear(name, set_to_none=set_to_none)
        rank.synchronise(100)
        rank.check({n: 100.0 if n == name else 106.0 for n in NAMES})

    @both
    def test_exactly_its_slots(self, tier: Tier) -> None:
        """The slots of every node: another node's shard belongs to another rank."""
        rank = Rank(tier)
        rank.accumulate(1)
        rank.clear("w", set_to_none=True)
        assert rank.accumulation.settle() == ["tiny", "s"]
        (waiting,) = rank.accumulation._waiting.values()
        assert waiting.kept.view(2, -1).tolist() == [[0.0] * SLOTS["w"] + [1.0, 1.0]] * 2

    @both
    def test_a_rank_whose_shard_is_empty_follows_the_others(self, tier: Tier) -> None:
        rank = Rank(tier)
        rank.accumulate(1)
        rank.peers.say = lambda flags: _only(NAMES.index("tiny"))
        assert rank.accumulation.settle() == ["w", "s"]
        (waiting,) = rank.accumulation._waiting.values()
        assert waiting.kept.view(2, -1).tolist() == [[1.0] * SLOTS["w"] + [0.0, 1.0]] * 2

    @both
    def test_a_gradient_that_was_changed_is_refused(self, tier: Tier) -> None:
        rank = Rank(tier)
        rank.synchronise(5)
        rank.accumulate(1)
        rank.grad("s").mul_(2)
        for _ in range(2):
            with pytest.raises(FcdpError, match="gradient of parameter 's' was changed"):
                rank.synchronise(1)
        rank.clear(*NAMES, set_to_none=True)
        rank.synchronise(1)
        rank.check(1)

    def test_so_is_one_that_another_rank_changed(self) -> None:
        """If only the other rank raised, this rank would wait for it."""
        rank = Rank(Tier.GPU)
        rank.accumulate(1)
        rank.peers.say = lambda flags: _only(len(NAMES) + NAMES.index("tiny"))
        with pytest.raises(FcdpError, match="gradient of parameter 'tiny' was changed"):
            rank.synchronise(1)

    def test_ranks_ask_each_other_once_a_backward_and_only_if_something_waits(self) -> None:
        rank = Rank(Tier.GPU)
        rank.accumulate(1)
        assert rank.peers.agreed == 0
        losses = [rank.loss(1, accumulates=True, bucket=b) for b in (0, 1)]
        sum(losses).backward()
        assert rank.peers.agreed == 1
        rank.synchronise(1)
        rank.synchronise(1)
        assert rank.peers.agreed == 2


def _fail() -> None:
    raise ZeroDivisionError


class TestBackwards:
    """Any backward may fail until its end."""

    @both
    @pytest.mark.parametrize("accumulates", [True, False])
    def test_one_that_fails_must_be_cleared_away(self, tier: Tier, accumulates: bool) -> None:
        rank = Rank(tier)
        rank.accumulate(1)
        with pytest.raises(ZeroDivisionError):
            rank.loss(10, accumulates=accumulates, then=_fail).backward()
        for _ in range(2):
            with pytest.raises(FcdpError, match=r"backward failed .* parameter 'w' \(one of 3\)"):
                rank.synchronise(100)
            with pytest.raises(FcdpError, match="clear all gradients"):
                rank.accumulation.settle()
        rank.clear("w", set_to_none=True)
        with pytest.raises(FcdpError, match=r"parameter 'tiny' \(one of 2\)"):
            rank.synchronise(100)
        rank.clear(*NAMES, set_to_none=True)
        rank.accumulate(1)
        rank.synchronise(100)
        rank.check(101)

    @both
    def test_one_that_fails_with_nothing_before_it_leaves_nothing(self, tier: Tier) -> None:
        rank = Rank(tier)
        with pytest.raises(ZeroDivisionError):
            rank.loss(10, accumulates=True, then=_fail).backward()
        rank.accumulate(1)
        rank.synchronise(100)
        rank.check(101)

    @both
    def test_one_of_two_graphs_that_fails_between_them(self, tier: Tier) -> None:
        rank = Rank(tier)
        rank.accumulate(1)
        fails = rank.loss(10, accumulates=False, bucket=1, then=_fail)
        begins = rank.loss(10, accumulates=False)  # the last forward comes first
        with pytest.raises(ZeroDivisionError):
            (fails + begins).backward()
        with pytest.raises(FcdpError, match="a backward failed"):
            rank.synchronise(100)

    @both
    def test_both_kinds_at_once_synchronise(self, tier: Tier) -> None:
        rank = Rank(tier)
        rank.accumulate(1)
        sum(rank.loss(10, accumulates=a) for a in (True, False, True)).backward()
        rank.check(31)

    @both
    def test_one_nested_in_another(self, tier: Tier) -> None:
        """As in reentrant checkpointing: gradients on their way to the outer `.grad` were not cleared."""
        rank = Rank(tier)

        def nested() -> None:
            with torch.enable_grad():
                loss = rank.loss(10, accumulates=True, bucket=1)
            loss.backward()

        for _ in range(2):
            rank.loss(1, accumulates=True, then=nested).backward()
        rank.synchronise(100)
        rank.check(102)
        assert torch.equal(rank.grad("v"), torch.full((1,), 20.0))

    @both
    def test_gradients_that_autograd_does_not_add_up_are_refused(self, tier: Tier) -> None:
        rank = Rank(tier)
        rank.accumulate(1)
        wanted = rank.records["w"].parameter
        with pytest.raises(FcdpError, match=r"did not add to the \.grad of parameter 'w'"):
            torch.autograd.grad(rank.loss(10, accumulates=False), wanted)
        with pytest.raises(FcdpError, match="a backward failed"):
            rank.synchronise(100)
        rank.clear(*NAMES, set_to_none=True)
        with pytest.raises(FcdpError, match=r"parameter 'tiny' \(one of 2\)"):
            rank.loss(10, accumulates=True).backward(inputs=[wanted])

    def test_others_may_add_to_a_gradient_in_the_same_backward(self) -> None:
        rank = Rank(Tier.GPU)
        scalar = rank.records["s"].parameter
        (rank.loss(1, accumulates=True) + 4 * scalar).backward()
        rank.accumulate(10)
        rank.synchronise(100)
        rank.check({"w": 111.0, "tiny": 111.0, "s": 115.0})
