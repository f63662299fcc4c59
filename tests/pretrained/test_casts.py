"""The dtypes of checkpoints that a model accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fcdp_compile
from fcdp_compile.errors import CheckpointError


class Counted(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize(
    ("saved", "model", "is_taken"),
    [
        (torch.int64, torch.int64, True),
        (torch.int32, torch.int64, True),
        (torch.bool, torch.int32, True),
        (torch.float64, torch.float16, True),
        (torch.int64, torch.int32, False),  # 2**33 would become 0
        (torch.int8, torch.uint8, False),
        (torch.float32, torch.int32, False),
        (torch.int32, torch.float32, False),
    ],
)
def test_no_number_becomes_another(
    tmp_path: Path, saved: torch.dtype, model: torch.dtype, is_taken: bool
) -> None:
    tensors = {"weight": torch.ones(2), "count": torch.ones(2, dtype=saved)}
    save_file(tensors, tmp_path / "model.safetensors")
    counted = fcdp_compile.shard(Counted(model))
    if is_taken:
        fcdp_compile.load_pretrained(counted, tmp_path)
        assert counted.count.tolist() == [1, 1]
        assert counted.weight.dtype == torch.bfloat16
        return
    with pytest.raises(
        CheckpointError, match=r"'count' of model.safetensors is .*, which cannot be cast"
    ):
        fcdp_compile.load_pretrained(counted, tmp_path)
    assert counted.weight.tolist() == [0, 0]
