"""Import everything that every rank needs once, in the server that ranks are forked from.

torch imports many modules only when it first compiles.  The modules' half a million objects are frozen, so
that garbage collections skip them: with a small model, collecting them took a third of a rank's time.
"""

from __future__ import annotations

import gc

import peft  # noqa: F401
import torch
import torch._dynamo.repro.after_dynamo
import torch._inductor.codegen.cpp
import torch._inductor.compile_fx
import torch.distributed.checkpoint.state_dict
import torch.distributed.tensor.experimental
import torch.export._trace
import transformers  # noqa: F401

import fcdp_compile.backend
import fcdp_compile.sharding.shard  # noqa: F401
import tests.distributed.models
import tests.distributed.parity  # noqa: F401

torch._dynamo.list_backends()  # imports all backends, as the first use of a backend would
gc.collect()
gc.freeze()
