"""Every private name of torch that fcdp uses, in one place.  docs/versions.md lists the tested versions.

There is one file for each part of torch; what needs no code of ours is here.
"""

from __future__ import annotations

from functorch.compile import (
    min_cut_rematerialization_partition as min_cut_rematerialization_partition,
)
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

# docs/seeing.md tells users this name.
from fcdp_compile.torch_compat.autograd import every_thread as every_thread

DispatchMode = TorchDispatchMode
NormWithStatistics = _NormBase
is_wrapper_subclass = is_traceable_wrapper_subclass
