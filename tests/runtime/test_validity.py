"""Generations order changes."""

from __future__ import annotations

from fcdp_compile.runtime.parameters.record import Generations


class TestGenerations:
    def test_of_a_bucket_is_its_youngest(self) -> None:
        generations = Generations(["a", "b", "c"])
        assert generations.of(["a", "b"]) == 0
        generations.change(["a"])
        assert (generations.of(["a", "b"]), generations.of(["b", "c"])) == (1, 0)
        generations.change(["b", "c"])
        assert (generations.of(["a"]), generations.of(["a", "b"])) == (1, 2)

    def test_every_change_is_a_new_one(self) -> None:
        generations = Generations(["a"])
        seen = []
        for _ in range(3):
            generations.change(["a"])
            seen.append(generations.of(["a"]))
        assert seen == [1, 2, 3]

    def test_of_nothing(self) -> None:
        assert Generations([]).of([]) == 0
