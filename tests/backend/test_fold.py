"""Names and numbers as people would write them: equal layers in one line, runs as ranges."""

from __future__ import annotations

import pytest

from builders_plan import make_params
from fcdp_compile.tools.view.short_names import fold_numbers, fold_params


def fold(*names: str) -> list[str]:
    return fold_params(make_params([(name, (4, 4)) for name in names], 1, 1))


def test_layers_fold_and_the_rest_stays() -> None:
    assert fold("embed.weight", "layers.0.w", "layers.1.w", "layers.2.w", "head.weight") == [
        "embed.weight",
        "layers.{0-2}.w  x3",
        "head.weight",
    ]


def test_gaps_are_shown() -> None:
    assert fold("h.0.w", "h.1.w", "h.5.w", "h.7.w") == ["h.{0-1,5,7}.w  x4"]


def test_two_numbers_fold_if_every_combination_exists() -> None:
    names = [f"layers.{i}.experts.{j}.w" for i in range(3) for j in range(4)]
    assert fold(*names) == ["layers.{0-2}.experts.{0-3}.w  x12"]
    assert fold(*names[:-1]) == [
        "layers.0.experts.{0-3}.w  x4",
        "layers.1.experts.{0-3}.w  x4",
        "layers.2.experts.{0-2}.w  x3",
    ]


def test_other_shapes_and_other_spellings_do_not_fold() -> None:
    params = make_params([("layers.0.w", (4,)), ("layers.1.w", (5,))], 1, 1)
    assert fold_params(params) == ["layers.0.w", "layers.1.w"]
    assert fold("layers.01.w", "layers.1.w") == ["layers.01.w", "layers.1.w"]
    assert fold("w1", "w2") == ["w1", "w2"]


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([4], "4"), ([4, 5], "4-5"), ([0, 2, 3, 4, 9], "0,2-4,9")]
)
def test_runs_of_numbers(numbers: list[int], text: str) -> None:
    assert fold_numbers(numbers) == text
