"""`accelerate.Accelerator` that shards and compiles with fcdp instead of wrapping models in DDP.

    from fcdp_compile.integrations.accelerate import Accelerator    # the one line that changes
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The Trainers of `integrations.transformers` and `integrations.trl` run on it.  Tried with accelerate 1.15.
"""

from __future__ import annotations

from fcdp_compile.extras import require

require("accelerate", "fcdp in Accelerate")

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, DynamoBackend, gather_object, recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fcdp_compile.core.params.home_shard import REPLACED
from fcdp_compile.core.params.mesh import make_mesh, process_count
from fcdp_compile.core.ranks.inner_mesh import PP, cp_of, tp_of
from fcdp_compile.core.sharding.no_sync import no_sync
from fcdp_compile.core.sharding.shard import is_sharded, mesh_of, model_of, shard, state_of
from fcdp_compile.errors import ArgumentError
from fcdp_compile.integrations.generation import generate_together
from fcdp_compile.integrations.optimizer_params import sharded_within
from fcdp_compile.integrations.options import FcdpOptions, refuse_shared
from fcdp_compile.models.checkpointing.loading import load
from fcdp_compile.models.checkpointing.saving import save
from fcdp_compile.models.parallel.context import context_parallel
from fcdp_compile.models.parallel.tensor import is_cut, tensor_parallel
from fcdp_compile.models.pretrained.exporting.export import save_pretrained
from fcdp_compile.torch_compat.compilers import own_recompiles

_FOLDER = "fcdp"
"""The folder within a saved state that `fcdp_compile.save` writes."""

_RECOMPILES = 32
"""Dynamo's 8 are few for a Trainer: it trains and evaluates, with adapters and without, in several shapes."""


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` on fcdp: `prepare` shards each model and compiles it with backend "fcdp".

    fcdp: the options; by default strategy "fcdp" on torchrun's nodes.  mode: as `torch.compile` takes it.
    parallelism_config: Accelerate's; cp_size or sp_size means `FcdpOptions(cp=…)`, tp_size means `tp=…`.

    An optimizer is prepared together with its model, or built after the model is prepared.  A model that is
    prepared with evaluation_mode=True, such as a reference, a teacher or a reward model, is frozen, so its
    weights cross between nodes once; preparing it for training takes the freezing back.  All models share
    one mesh, and so lanes and host memory.

    Raises: ValueError if Accelerate was configured to shard or to compile in another way.
    """

    def __init__(
        self,
        *args: Any,
        fcdp: FcdpOptions | None = None,
        mode: str | None = None,
        parallelism_config: accelerate.ParallelismConfig | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._begin((fcdp or FcdpOptions()).with_parallelism(parallelism_config), mode)

    @staticmethod
    def adopt(
        accelerator: accelerate.Accelerator, fcdp: FcdpOptions | None, mode: str | None = None
    ) -> Accelerator:
        """Make an Accelerator that a library has built one of this class, the same object."""
        accelerator.__class__ = Accelerator
        assert isinstance(accelerator, Accelerator)
        accelerator._begin(fcdp, mode)
        return accelerator

    def _begin(self, fcdp: FcdpOptions | None, mode: str | None) -> None:
        check_launch(self.state)
        self.fcdp = fcdp or FcdpOptions()
        self._mode = mode
        self._mesh: list[DeviceMesh | None] = []  # at most one; None in a single process
        # Accelerate's own list is emptied at the start of every training.
        self._prepared = _Prepared()

    # --- models -------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare objects as `accelerate.Accelerator.prepare`; optimizers get the sharded parameters.

        Raises: ArgumentError for an optimizer that has taken steps before its model is sharded.
        """
        optimizers = [getattr(o, "optimizer", o) for o in args if isinstance(o, Optimizer)]
        with sharded_within(optimizers, *(m for m in args if isinstance(m, nn.Module))):
            return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Shard a model unless that has been done, and compile it; all ranks must call it.

        evaluation_mode: freeze it, and shard it with `FcdpOptions.companion_strategy`.

        Raises: the errors of `fcdp_compile.shard`.
        """
        root = model_of(model)
        is_new = root not in self._prepared
        if not is_sharded(root):
            _refuse_shared_parameters(root)
            options = self.fcdp.of_companions() if evaluation_mode else self.fcdp
            if not is_cut(root):
                tensor_parallel(root, self.mesh)
            context_parallel(root, self.mesh)
            with _frozen(root) if evaluation_mode else nullcontext():
                shard(root, self.mesh, **options.shard_arguments())
            _sharded_with[root] = self.fcdp.sharding()
        elif is_new:
            if not evaluation_mode and _sharded_with.get(root) != self.fcdp.sharding():
                self.fcdp.check_sharded_before(mesh_of(root))
            self.share_mesh_of(root)
        if not evaluation_mode:
            _unfreeze(root)
        if is_new:
            _forget_autocast(root)  # of an Accelerator that had it earlier
        before = vars(root).get("forward")
        # evaluation_mode leaves out DistributedDataParallel, which refuses DTensor parameters.
        super().prepare_model(root, device_placement=False, evaluation_mode=True)
        if is_new:
            self._prepared.add(root)
            if (now := vars(root).get("forward")) is not before:
                vars(root)[_AUTOCAST] = now, before
            # Or autocast would wrap the forward again at each training.
            vars(root)["_is_accelerate_prepared"] = True
            if model is root:  # else its owner has compiled it
                self._compile(root)
        return model

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of all models: of the first one that was sharded before, or made from the options."""
        # Once, also for the models that a Trainer's model_init makes: torch never frees a mesh's groups.
        if not self._mesh:
            self._mesh.append(make_mesh(self.fcdp.nodes, cp=self.fcdp.cp, tp=self.fcdp.tp))
        return self._mesh[0]

    @property
    def cp(self) -> int:
        """How many ranks share a sequence."""
        return cp_of(self.mesh)

    @property
    def tp(self) -> int:
        """How many ranks share each parameter."""
        return tp_of(self.mesh)

    @property
    def sharers(self) -> int:
        """How many ranks, one after the other, get the same batches."""
        return self.cp * self.tp

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As `accelerate.Accelerator.prepare_data_loader`; ranks that share work get the same batches.

        Raises: ArgumentError for dispatch_batches=True with such ranks.
        """
        settings = self.dataloader_config
        if self.sharers > 1 and settings.dispatch_batches is not False:
            if settings.dispatch_batches:
                raise ArgumentError(
                    "dispatch_batches=True would give ranks that share sequences or parameters (cp, tp) "
                    "different batches; leave it out, and each rank reads its own"
                )
            settings.dispatch_batches = False
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def _prepare_device_mesh(self) -> Any:
        """What Accelerate's data loaders ask: ranks that share work get the same batches."""
        if self.sharers == 1:
            return super()._prepare_device_mesh()
        return _Loading(dp_shard=self.num_processes // self.sharers, cp=self.sharers)

    def share_mesh_of(self, model: nn.Module) -> None:
        """Shard the models that come on the mesh of a sharded model, unless there is a mesh already.

        Raises: ArgumentError for a mesh whose ranks would get wrong batches.
        """
        refuse_shared(mesh_of(model), (PP,), "Accelerate")
        if not self._mesh:
            self._mesh.append(mesh_of(model))

    def _compile(self, model: nn.Module) -> None:
        # In place: Trainers also call the bare model (TRL for log probabilities without an adapter), and test
        # a model for truth, which the wrapper of torch.compile refuses.
        how = self.fcdp.compile_arguments()
        model.compile(mode=self._mode, **how, **own_recompiles(_RECOMPILES))
        generate_together(model, self.fcdp.generate)

    # --- steps --------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """As `accelerate.Accelerator.no_sync`, with `fcdp_compile.no_sync` for a sharded model."""
        if is_sharded(model):
            return no_sync(model)
        found: AbstractContextManager[None] = super().no_sync(model)
        return found

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """As `accelerate.Accelerator.trigger_sync_in_backward`: `.grad` is complete after the block."""
        if not is_sharded(model):
            with accelerate.Accelerator.trigger_sync_in_backward(model):
                yield
            return
        yield
        state_of(model).accumulation.synchronise()

    @contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """As `accelerate.Accelerator.join_uneven_inputs`, without sharded models.

        Raises: ArgumentError for a sharded model if batches may be uneven: every rank has a part of it.
        """
        if not any(isinstance(j, nn.Module) and is_sharded(j) for j in joinables):
            with super().join_uneven_inputs(joinables, even_batches=even_batches):
                yield
            return
        if not self.even_batches or even_batches is False:
            raise ArgumentError(
                "join_uneven_inputs lets a rank without batches stop early, but every rank has a part of a "
                "sharded model and must take every step; leave even_batches=True"
            )
        yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip as `accelerate.Accelerator.clip_grad_norm_`; the norm is a plain tensor, as with DDP."""
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `accelerate.Accelerator.gather_for_metrics`.

        `cp` ranks have parts of the same samples; of `tp` ranks, which have the same values, one is asked.
        """
        if self.sharers == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        # The last batch is filled up with samples that came before.
        left = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        kept = slice(left * self.cp if left > 0 else None)
        if use_gather_object:
            is_asked = self.process_index % self.tp == 0
            return gather_object(input_data if is_asked else [])[kept]

        def of_one(gathered: Tensor) -> Tensor:
            by_rank: Tensor = gathered.unflatten(0, (self.num_processes, -1))
            return by_rank[:: self.tp].flatten(0, 1)[kept]

        return recursively_apply(of_one, self.gather(input_data))

    # --- saving -------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """Save as `accelerate.Accelerator.save_state`, models and optimizers with `fcdp_compile.save`.

        All ranks must call it; the folder is one that all nodes share.
        """
        states = _states_of(self._models, self._optimizers)
        with self._without_sharded():
            folder: str = super().save_state(output_dir, *args, **kwargs)
        for i, (model, optimizer) in enumerate(states):
            save(_folder_of(folder, i), model=model, optimizer=optimizer)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` has written; all ranks must call it."""
        states = _states_of(self._models, self._optimizers)
        if input_dir is None:
            raise ArgumentError("load_state needs the folder that save_state returned; pass it")
        for i, (model, optimizer) in enumerate(states):
            load(_folder_of(input_dir, i), model=model, optimizer=optimizer)
        with self._without_sharded():
            super().load_state(input_dir, *args, **kwargs)

    def save_model(self, model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write files for `from_pretrained` (`fcdp_compile.save_pretrained`); all ranks must call it."""
        save_pretrained(model, save_directory)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Refuse: a sharded model's whole values are written to files, never held together in memory.

        Raises: ArgumentError.
        """
        raise ArgumentError(
            "Accelerator.get_state_dict would hold the whole model in the memory of one rank; call "
            "fcdp_compile.save_pretrained(model, folder) on every rank, or read fcdp_compile.stream_state"
        )

    @contextmanager
    def _without_sharded(self) -> Iterator[None]:
        """Hide models and optimizers from Accelerate, which would write this rank's parts as the whole."""
        models, optimizers = self._models, self._optimizers
        self._models: list[Any] = []
        self._optimizers: list[Any] = []
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers


class _Loading:
    """The dimensions of a mesh as Accelerate's data loaders read them."""

    def __init__(self, **sizes: int) -> None:
        self.mesh_dim_names = tuple(sizes)
        self._sizes = sizes

    def __getitem__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: self._sizes[name])


class _Prepared(weakref.WeakSet[nn.Module]):
    """Models; pickled without them, so that an Accelerator can be pickled."""

    def __reduce__(self) -> Any:
        return _Prepared, ()


_sharded_with: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
"""The options of the models that an Accelerator has sharded: another one may have the same options."""

_trained_before: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
"""The names of the parameters that were trained in models that an Accelerator has frozen."""


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Freeze a model that is sharded within the block; another model may share its parameters until then."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    model.requires_grad_(False)
    try:
        yield
        _trained_before[model] = list(trained)
    finally:
        for parameter in trained.values():
            parameter.requires_grad_(True)


def _unfreeze(model: nn.Module) -> None:
    """Take back what `_frozen` has done, because the model is trained after all."""
    for name in _trained_before.pop(model, ()):
        model.get_parameter(name).requires_grad_(True)


def _refuse_shared_parameters(model: nn.Module) -> None:
    """Refuse parameters that are trained and shared with a sharded model, which would not see the steps.

    Raises: ArgumentError.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (other := getattr(parameter, REPLACED, None)) is not None:
            raise ArgumentError(
                f"parameter {name!r} is trained, and is also {other!r} of a model that has been sharded, "
                "such as a reference; sharded models share no parameters: give the other model a copy, "
                "or freeze the parameter"
            )


_AUTOCAST = "_fcdp_autocast"
"""The attribute with the forward that Accelerate has set for autocast, and with the one before, or None."""


def _forget_autocast(model: nn.Module) -> None:
    """Take back what an earlier Accelerator has done to a model's forward, if nothing came on top of it."""
    own = vars(model)
    set_by_it, before = own.pop(_AUTOCAST, (None, None))
    own.pop("_is_accelerate_prepared", None)
    if set_by_it is None or own.get("forward") is not set_by_it:
        return
    own.pop("_original_forward", None)
    if before is None:
        del own["forward"]
    else:
        own["forward"] = before


def check_launch(state: AcceleratorState) -> None:
    """Refuse settings that Accelerate gets from `accelerate launch` or the environment.

    Raises: ValueError.
    """
    distributed_type, dynamo_backend = state.distributed_type, state.dynamo_plugin.backend
    known = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if distributed_type not in known:
        raise ArgumentError(
            f"Accelerate is set up for {distributed_type.value}, and one model cannot be sharded by two "
            "systems; start it with torchrun or accelerate launch --multi_gpu"
        )
    if state.parallelism_config is not None:
        raise ArgumentError(
            "Accelerate itself was given a parallelism_config (accelerate launch or "
            "ACCELERATE_USE_PARALLELISM_CONFIG), and one model cannot be sharded by two systems; give it to "
            "TrainingArguments or to fcdp's Accelerator"
        )
    if (world := process_count()) != state.num_processes:
        # Every process would then train on the same data.
        raise ArgumentError(
            f"{world} processes run, but Accelerate sees {state.num_processes}; on a machine without "
            "GPUs, give TrainingArguments(use_cpu=True) or Accelerator(cpu=True)"
        )
    if dynamo_backend is not DynamoBackend.NO:
        raise ArgumentError(
            f"Accelerate was configured to compile with {dynamo_backend.value}, but fcdp compiles; unset "
            "ACCELERATE_DYNAMO_BACKEND (accelerate launch --dynamo_backend no)"
        )


def _folder_of(folder: str, i: int) -> Path:
    """The folder of the i-th model within a saved state."""
    return Path(folder, _FOLDER if i == 0 else f"{_FOLDER}_{i}")


def _states_of(
    models: Iterable[nn.Module], optimizers: Iterable[Any]
) -> list[tuple[nn.Module, Optimizer | None]]:
    """The models with parameters that are trained, each with its optimizer.

    Raises: ArgumentError if a model has several optimizers, or an optimizer several models.
    """
    bare: list[Any] = [getattr(o, "optimizer", o) for o in optimizers]
    found: list[tuple[nn.Module, Optimizer | None]] = []
    taken: set[int] = set()
    for root in dict.fromkeys(model_of(m) for m in models):
        own = {id(p) for p in root.parameters() if p.requires_grad}
        having = [o for o in bare if any(id(p) in own for g in o.param_groups for p in g["params"])]
        if len(having) > 1:
            raise ArgumentError(
                f"{len(having)} optimizers train one model, but a saved state has one for each model; "
                "give all its parameters to one optimizer"
            )
        if any(id(o) in taken for o in having):
            raise ArgumentError(
                "one optimizer trains several models, but a saved state has one for each model; give "
                "each model an optimizer of its own"
            )
        taken.update(map(id, having))
        if own:
            found.append((root, having[0] if having else None))
    return found
