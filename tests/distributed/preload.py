"""Import everything that every rank needs once, in the server that ranks are forked from.

torch imports many modules only when it first compiles.  Dynamo also tokenises the source files it traces,
to name functions; for a small model that takes a sixth of a rank's first compilation.  The modules' half a
million objects are frozen, so that garbage collections skip them: with a small model, collecting them took a
third of a rank's time.
"""

from __future__ import annotations

import gc
import sys

import peft  # noqa: F401
import torch
import torch._dynamo.funcname_cache
import torch._dynamo.repro.after_dynamo
import torch._inductor.codegen.cpp
import torch._inductor.compile_fx
import torch.distributed.checkpoint.state_dict
import torch.distributed.tensor.experimental
import torch.export._trace
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import fcdp_compile.backend
import fcdp_compile.core.sharding.shard  # noqa: F401
import tests.distributed.models
import tests.distributed.parity  # noqa: F401

_TRACED = (
    "torch.nn.functional",
    *(
        f"torch.nn.modules.{name}"
        for name in ("dropout", "linear", "module", "normalization", "sparse")
    ),
    *(
        f"transformers.{name}"
        for name in ("activations", "cache_utils", "modeling_utils", "pytorch_utils")
    ),
    "transformers.integrations.sdpa_attention",
    "transformers.loss.loss_utils",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "peft.tuners.lora.layer",
    "fcdp_compile.core.sharding.sharded_class",
    "tests.distributed.models",
)
"""The modules whose source Dynamo traces in the models of most tests."""

for _name in _TRACED:
    torch._dynamo.funcname_cache.get_funcname(sys.modules[_name].__file__ or "", 1)
torch._dynamo.list_backends()  # imports all backends, as the first use of a backend would
gc.collect()
gc.freeze()
