"""What every rank would import or look through anew, done once in the server that ranks are forked from.

torch imports much of it when something is first compiled.  What is frozen no collection looks at again: with
a small model collections of the modules' half a million objects took a third of a rank's time.
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

torch._dynamo.list_backends()  # imports them all, as does the first use of one
gc.collect()
gc.freeze()
