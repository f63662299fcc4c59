"""Import everything that every rank needs once, in the server that ranks are forked from.

torch imports many modules only when it first compiles, and fills caches, which took a third of the time of
a small model's compilation; so the server compiles a small model.  The modules' half a million objects are
frozen, so that garbage collections skip them: with a small model, collecting them took a third of a rank's
time.
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
import fcdp_compile.core.sharding.shard  # noqa: F401
import tests.distributed.models
import tests.distributed.parity


def _compile_once() -> None:
    case = tests.distributed.models.CASES["odd"]
    net = torch.compile(case.model(), backend="aot_eager")
    case.loss(net, torch.zeros(2, 4, dtype=torch.int64)).backward()
    torch._dynamo.reset()


torch._dynamo.list_backends()  # imports all backends, as the first use of a backend would
# With a card, autograd has threads of its own, which forked ranks would lack.
if torch.version.cuda is None and torch.version.hip is None:
    torch.set_num_threads(1)
    _compile_once()
gc.collect()
gc.freeze()
