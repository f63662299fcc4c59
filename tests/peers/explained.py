"""Why a case is not equal: what the suite assumes, or what fcdp does not do.  The first match counts."""

from __future__ import annotations

import re

_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "",
        r"puts another tensor in a parameter's place",
        "[a limit](limits.md#not-there): no tensor can take the place of a sharded parameter",
    ),
    (
        r"OFT, ",
        r"forward writes to parameter",
        "constrained OFT writes in its forward, [which is refused](limits.md#to-know)",
    ),
    (
        "",
        r"a view of a sharded tensor that spans ranks is a copy|a plain one of shape .* which it writes to",
        "torch computes the gradient in a view or in a plain tensor, where the part of a rank would be lost",
    ),
    (
        "test_param_registration_after_forward",
        r"is an instance of",
        "it looks for the whole parameters that FSDP2 leaves in a module; fcdp's are always home shards",
    ),
    (
        "",
        r"convert the model before fcdp_compile.shard",
        "[a limit](loop.md#what-shard-must-see-first): a sharded model keeps its dtype",
    ),
    (
        "test_grouped_module_cast_forward_inputs",
        r"same dtype",
        "FSDP2 casts inputs of each module that it wraps; fcdp [casts the model's](coming-from.md#fsdp2)",
    ),
    (
        "test_shared_params_separate_fsdp_groups_error",
        r"ValueError not raised",
        "it expects FSDP2's error for tied parameters in modules that were wrapped apart; fcdp trains them",
    ),
    (
        "test_partial_group_forward_then_standalone",
        r"reshard_after_forward=1",
        "parameters that stay whole on each rank are `reshard_after_forward=False`",
    ),
    (
        "",
        r"one reshard_after_forward for a whole model",
        "[the suite's adapter](coming-from.md#fsdp2)",
    ),
    ("", r"FSDP2's own state", "fcdp has no such state"),
    ("test_post_optim_event", r"set_post_optim_event", "an event of FSDP2's own streams"),
    (
        "",
        r"Accelerator expected|_cuda_setDevice|Cannot access accelerator device",
        "the test needs a GPU",
    ),
    (
        "",
        r"_flat_weights",
        "[a limit](limits.md#not-there): torch's RNNs keep their parameters in a list",
    ),
    ("", r"resize_\.default cannot give", "each rank holds rows of the shape that the tensor had"),
    (
        "tensor_split",
        r"data is not allocated",
        "torch reads where to split from a tensor's memory, of which each rank has a part",
    ),
    ("to_sparse", r"SparseCPU", "a sharded tensor is dense, and so is what is made of it"),
    (
        "",
        r"Some tensors share memory",
        "torch's writer of safetensors [takes no tied weights](saving.md#pytorchs-own-tools)",
    ),
    ("", r"looks for FSDP2's classes", "the test is about how FSDP2 is built"),
    (
        "",
        r"expert parallelism of ranks",
        "in fcdp the ranks that cut experts [share a batch](tensor-parallel.md)",
    ),
    (
        "",
        r"is required for|No module named|Please install",
        "the suite needs a package that is not installed",
    ),
    ("", r"main calls it|written for (2|8|one) rank", "the suite's own condition"),
    (
        "",
        r"join_uneven_inputs lets",
        "[a limit](accelerate.md): every rank has a part of the model, so all take every step",
    ),
    (
        "",
        r"no values that could be compared",
        "it returns memory as it is, or takes complex numbers only",
    ),
    ("", r"refuses the inputs of the table", "the operator is for GPUs, or for other arguments"),
    ("", r"the table has no|has no expert parallel plan", "the suite itself leaves it out"),
    ("", r"has no parameters", "there is nothing to shard"),
)
"""Patterns of the case and of what was said, and the explanation."""


def reason(case: str, text: str) -> str:
    """The explanation of an outcome, or a text that says that there is none."""
    found = (why for name, said, why in _REASONS if re.search(name, case) and re.search(said, text))
    return next(found, "**not explained yet**")
