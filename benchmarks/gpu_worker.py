"""One part of gpu_overlap on one rank; started by torchrun, all ranks on the same device.

gpu_worker.py copies|steps|fsdp2|parity-full|parity-lora cuda|cpu OUT.json [--tiny]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu_copies import measure_copies
from benchmarks.gpu_parity import measure_parity
from benchmarks.gpu_parts import Part, write_part
from benchmarks.gpu_steps import RANKS, measure_fsdp2, measure_steps
from benchmarks.shape import QUICK, Shape

# About 1.3 billion parameters, 2.7 GB in bfloat16.
_SHAPE = Shape(layers=24, width=2048, vocabulary=32000, batch=8, length=1024)
_COPIED_BYTES, _TINY_COPIED_BYTES = 512 * 2**20, 2**20


def main(part: str, device_type: str, out: Path, *, is_tiny: bool) -> None:
    """Measure the part; rank 0 writes it."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if part == "fsdp2":
        dist.init_process_group("fake", rank=0, world_size=RANKS)
    else:
        # Gloo for both: NCCL takes no two ranks on one GPU.
        dist.init_process_group("cpu:gloo,cuda:gloo" if device_type == "cuda" else "gloo")
    rank = dist.get_rank()
    found = _measure(part, device, out, shape=QUICK if is_tiny else _SHAPE, is_tiny=is_tiny)
    if rank == 0:
        write_part(out, found)
    if part != "fsdp2":
        dist.barrier()
    dist.destroy_process_group()


def _measure(part: str, device: torch.device, out: Path, *, shape: Shape, is_tiny: bool) -> Part:
    if part == "copies":
        return measure_copies(device, _TINY_COPIED_BYTES if is_tiny else _COPIED_BYTES)
    if part == "steps":
        return measure_steps(device, shape, out.with_name("gpu-trace.json.gz"))
    if part == "fsdp2":
        return measure_fsdp2(device, shape)
    return measure_parity(device, part.removeprefix("parity-"))


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), is_tiny="--tiny" in sys.argv)
