"""PyTorch's own tests of FSDP2, with `fcdp_compile.shard` in place of `fully_shard`.

The files test_fully_shard_*.py are in no wheel: `--torch-tests FOLDER` names a folder that has them.  Their
classes start processes of their own; here the test methods run within our four ranks, on CPUs.  A case
covers all combinations of options that a method tries, but for those that fcdp has no equivalent of.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.peers.fully_shard import Sharding
from tests.peers.outcomes import SkippedError, Status, outcome_of

FOLDER = "FCDP_TORCH_TESTS"
"""The environment variable that tells the ranks where the files are."""

CASE_LIMIT_S = 900.0
"""Up to 24 combinations, most of which compile a model."""

_FILES = ("frozen", "clip_grad_norm_", "state_dict", "grad_scaler", "ignore_params", "training")
_WAYS = ("compiled", "eager")

_EDITS = (
    # What the suite asks of an accelerator, asked of CPUs.
    (r"torch\.accelerator\.current_accelerator\(\)\.type|\"cuda\"", '"cpu"'),
    (r"\.cuda\(\)|,\s*device_ids=\[self\.rank\]", ""),
    (r"_local_tensor\.device\.index", "device_mesh.get_rank()"),
    (r"\"cpu_state_dict\": \[True, False\]", '"cpu_state_dict": [True]'),
    (r"\"mutate_after_state_dict\": \[True, False\]", '"mutate_after_state_dict": [False]'),
    # Parts of a gradient that are cut for two ranks have a norm above 1; smaller parts may not.
    (r"self\.assertTrue\(\s*all\([^)]*\)\.item\(\) > max_norm for g in local_grads\)\s*\)", "pass"),
    # What it says of FSDP2's mesh, collectives and hooks rather than of numbers.
    (r"self\.assert\w+\((?:p\.device_mesh|len\(p\.placements\))[^()]*(?:\([^()]*\))?\)", "pass"),
    (r"self\.assert\w+\(\s*comm_mode\.get_comm_counts\(\)\[[^]]*\],[^()]*\)", "pass"),
    (r"self\.assert\w+\(\s*\w*(?:backward|gather|scatter|reduce)_count\b[^)]*\)", "pass"),
)
"""Patterns in the files, and what takes their place."""


_DOUBLE = ("test_clip_grad_norm_2d",)
"""Tests whose gradients are zero but for rounding, of which Adam makes whole steps: they run in float64."""

_ATTENDING = ("test_clip_grad_norm_2d",)
"""Tests of attention with tensor parallelism."""


def version() -> str:
    return f"torch {torch.__version__}"


def cases() -> list[str]:
    return [f"{name}, {way}" for name in _methods() for way in _WAYS]


def run(mesh: DeviceMesh, case: str) -> None:
    """Call one test method on this rank."""
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.testing._internal import common_fsdp
    from torch.testing._internal.common_utils import set_default_dtype, set_rng_seed

    name, _, way = case.rpartition(", ")
    script, kind = _methods()[name]
    if "WorldSize1" in kind.__name__:
        raise SkippedError("the suite's own condition: it is written for one rank")
    method = name.partition(".")[2]
    test = type(kind.__name__, (_Combinations, kind), {"world_size": dist.get_world_size()})(method)
    test.rank, test.left_out = dist.get_rank(), []
    sharding = Sharding(mesh, is_compiled=way == "compiled")
    ours = sharding.names_in(script)
    set_rng_seed(0)
    with (
        set_default_dtype(torch.float64 if method in _DOUBLE else torch.float32),
        mock.patch.dict(vars(script), ours),
        mock.patch.dict(vars(common_fsdp), {n: ours[n] for n in ("fully_shard", "checkpoint")}),
        sharding.noticing_uses(),
        # DTensor has no rule for the CPU's own attention, whose general form makes a mask.
        sdpa_kernel(SDPBackend.MATH),
        implicit_replication() if method in _ATTENDING else contextlib.nullcontext(),
    ):
        test.attempt(functools.partial(inspect.unwrap(getattr(kind, method)), test))
    # What fcdp refused is worth more than what was left out, and some combinations may be left out.
    for error in sorted(test.left_out, key=lambda one: isinstance(one, SkippedError)):
        if not (isinstance(error, SkippedError) and test.has_run):
            raise error


class _Combinations:
    """Runs all combinations of options, also after one that is refused or has no equivalent."""

    left_out: list[Exception]
    has_run = False

    def run_subtests(
        self, options: dict[str, list[Any]], function: Callable[..., None], *args: Any, **more: Any
    ) -> None:
        for values in itertools.product(*options.values()):
            chosen = dict(zip(options, values, strict=True))
            if len({value for name, value in chosen.items() if name.startswith("delay_")}) > 1:
                continue  # the delays are for races of GPU streams; none or all of them
            self.has_run |= self.attempt(
                functools.partial(function, *args, **more, **chosen), about=f"{chosen}: "
            )
            torch._dynamo.reset()
            dist.barrier()

    def attempt(self, call: Callable[[], None], about: str = "") -> bool:
        """Whether it ran to its end; raises if it failed."""
        try:
            call()
        except Exception as error:
            if outcome_of(error).status is Status.FAILED:
                raise AssertionError(f"{about}{type(error).__name__}: {error}") from None
            self.left_out.append(error)
            return False
        return True


@functools.cache
def _methods() -> dict[str, tuple[ModuleType, Any]]:
    """The module and class of each test method, by file and name."""
    found: dict[str, tuple[ModuleType, Any]] = {}
    for file in _FILES:
        path = Path(os.environ.get(FOLDER, ""), f"test_fully_shard_{file}.py")
        script = _edited(f"peers_{file}", path) if path.is_file() else ModuleType("")
        for kind in list(vars(script).values()):
            if isinstance(kind, type) and kind.__module__ == script.__name__:
                names = [name for name in vars(kind) if name.startswith("test")]
                found |= {f"{file}.{name}": (script, kind) for name in names}
    return found


def _edited(name: str, path: Path) -> ModuleType:
    """Our copy of a file of tests."""
    text = path.read_text(encoding="utf-8")
    for pattern, ours in _EDITS:
        text = re.sub(pattern, ours, text)
    module = sys.modules[name] = ModuleType(name)
    exec(compile(text, str(path), "exec"), vars(module))
    return module
