"""Every private name of torch that fcdp uses, in one place.  docs/versions.md lists the tested versions.

There is one file for each part of torch; other packages import the names from here.
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

from fcdp_compile.torch_compat.autograd import at_end_of_backward as at_end_of_backward
from fcdp_compile.torch_compat.autograd import backward_number as backward_number
from fcdp_compile.torch_compat.autograd import every_thread as every_thread
from fcdp_compile.torch_compat.autograd import gradient_hooks as gradient_hooks
from fcdp_compile.torch_compat.autograd import is_in_derivative as is_in_derivative
from fcdp_compile.torch_compat.autograd import is_in_transform as is_in_transform
from fcdp_compile.torch_compat.autograd import is_profiling as is_profiling
from fcdp_compile.torch_compat.autograd import is_recomputing as is_recomputing
from fcdp_compile.torch_compat.autograd import move_gradient_hooks as move_gradient_hooks
from fcdp_compile.torch_compat.autograd import name_thread as name_thread
from fcdp_compile.torch_compat.autograd import without_modes as without_modes
from fcdp_compile.torch_compat.autograd import without_torch_function as without_torch_function
from fcdp_compile.torch_compat.compilers import compile_with_inductor as compile_with_inductor
from fcdp_compile.torch_compat.compilers import eager_random as eager_random
from fcdp_compile.torch_compat.compilers import graph_break_places as graph_break_places
from fcdp_compile.torch_compat.compilers import graph_breaks as graph_breaks
from fcdp_compile.torch_compat.compilers import inductor_decompositions as inductor_decompositions
from fcdp_compile.torch_compat.compilers import inductor_modes as inductor_modes
from fcdp_compile.torch_compat.compilers import is_tracing as is_tracing
from fcdp_compile.torch_compat.compilers import joint_graph_passes as joint_graph_passes
from fcdp_compile.torch_compat.compilers import make_dynamic as make_dynamic
from fcdp_compile.torch_compat.compilers import own_recompiles as own_recompiles
from fcdp_compile.torch_compat.compilers import skip_frame as skip_frame
from fcdp_compile.torch_compat.compilers import skip_frames_below as skip_frames_below
from fcdp_compile.torch_compat.compilers import trace_artifact as trace_artifact
from fcdp_compile.torch_compat.compilers import why_no_inductor as why_no_inductor
from fcdp_compile.torch_compat.distributed import all_to_all_of_equals as all_to_all_of_equals
from fcdp_compile.torch_compat.distributed import (
    calls_dispatch_of_subclasses as calls_dispatch_of_subclasses,
)
from fcdp_compile.torch_compat.distributed import comes_from_peers as comes_from_peers
from fcdp_compile.torch_compat.distributed import dtensor_of as dtensor_of
from fcdp_compile.torch_compat.distributed import gloo_context_count as gloo_context_count
from fcdp_compile.torch_compat.distributed import gloo_timeout as gloo_timeout
from fcdp_compile.torch_compat.distributed import has_rule as has_rule
from fcdp_compile.torch_compat.distributed import last_collectives as last_collectives
from fcdp_compile.torch_compat.distributed import nccl_timeout as nccl_timeout
from fcdp_compile.torch_compat.distributed import rendezvous_store as rendezvous_store
from fcdp_compile.torch_compat.distributed import reshape_wrapper as reshape_wrapper
from fcdp_compile.torch_compat.distributed import start_fake_group as start_fake_group
from fcdp_compile.torch_compat.distributed import takes_plain_tensors as takes_plain_tensors
from fcdp_compile.torch_compat.distributed import wanted_placements as wanted_placements
from fcdp_compile.torch_compat.distributed import without_splitting as without_splitting
from fcdp_compile.torch_compat.graphs import as_boxed as as_boxed
from fcdp_compile.torch_compat.graphs import boxed as boxed
from fcdp_compile.torch_compat.graphs import fake_of as fake_of
from fcdp_compile.torch_compat.graphs import graph_module as graph_module
from fcdp_compile.torch_compat.graphs import graphs_from_bytes as graphs_from_bytes
from fcdp_compile.torch_compat.graphs import graphs_to_bytes as graphs_to_bytes
from fcdp_compile.torch_compat.graphs import is_opaque as is_opaque
from fcdp_compile.torch_compat.graphs import is_static_input as is_static_input
from fcdp_compile.torch_compat.graphs import meta_of as meta_of
from fcdp_compile.torch_compat.graphs import saved_output_descriptor as saved_output_descriptor
from fcdp_compile.torch_compat.graphs import tracing_mode as tracing_mode
from fcdp_compile.torch_compat.graphs import unwritten_inputs as unwritten_inputs
from fcdp_compile.torch_compat.graphs import without_code as without_code
from fcdp_compile.torch_compat.placements import NodeShard as NodeShard
from fcdp_compile.torch_compat.placements import matrices_in as matrices_in
from fcdp_compile.torch_compat.placements import one_run_only as one_run_only
from fcdp_compile.torch_compat.tensors import MemoryLayout as MemoryLayout
from fcdp_compile.torch_compat.tensors import Sanitizer as Sanitizer
from fcdp_compile.torch_compat.tensors import WrapperTensor as WrapperTensor
from fcdp_compile.torch_compat.tensors import copy_all as copy_all
from fcdp_compile.torch_compat.tensors import cuda_sanitizer as cuda_sanitizer
from fcdp_compile.torch_compat.tensors import storage_id as storage_id
from fcdp_compile.torch_compat.tensors import storage_uses as storage_uses

DispatchMode = TorchDispatchMode
NormWithStatistics = _NormBase
is_wrapper_subclass = is_traceable_wrapper_subclass
