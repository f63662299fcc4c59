"""Compare a checkpoint with the job that it is loaded into, before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fcdp_compile.core.params.layout import Box
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.checkpointing.contents import (
    JobObjects,
    Marking,
    extra_states,
    mark_of_all,
    own_mark,
    parameter_name,
    parameter_names,
    plain_tensors,
)
from fcdp_compile.models.checkpointing.format.record import (
    TORCH_DTYPES,
    CutTensor,
    cut,
    read_record,
)
from fcdp_compile.models.checkpointing.format.tree import TensorReference, has_state
from fcdp_compile.models.checkpointing.optimizers import check_groups, class_of
from fcdp_compile.models.quantised.weight import quantised_weights
from fcdp_compile.runtime.model import ShardedModel


class WantedRows(NamedTuple):
    """A cut tensor, saved in parts, and the blocks of the whole that this rank needs."""

    name: str
    dtype: torch.dtype
    tensors: list[CutTensor]
    spec: ParamSpec
    boxes: list[Box]


class Comparison:
    """A checkpoint in a folder and a job, on this rank.

    mark: what tells other values of parameters that were left out.

    Raises, in every method: CheckpointError, naming the folder and what differs.
    """

    def __init__(
        self,
        folder: Path,
        root: nn.Module,
        state: ShardedModel,
        job: JobObjects,
        mark: Marking = own_mark,
    ) -> None:
        self.folder, self.root, self.state, self.job = folder, root, state, job
        self._mark = mark
        self.record = record = read_record(folder)
        self._cuts: dict[str, list[CutTensor]] = {}
        for tensor in record.tensors:
            self._cuts.setdefault(tensor.name, []).append(tensor)
        self._left_out = {t.name: t for t in record.left_out}
        here = state.topology
        self.is_same_layout = record.layout == (here.nodes, here.ranks_per_node, here.sharers)

    def check_names(self, values: Collection[str]) -> None:
        """Compare names, and the shapes and dtypes of parameters; values: the names of the saved values."""
        self._check_model(set(values))
        needed = {"optimizer": "optimizer.class", "scheduler": "scheduler", "scaler": "scaler"}
        for owner, name in needed.items():
            if getattr(self.job, owner) is not None and name not in values:
                raise CheckpointError(
                    f"the checkpoint in {self.folder} was saved without a {owner}; leave {owner}=… out"
                )

    def wanted(self, values: Mapping[str, Any], differing: Collection[str]) -> list[WantedRows]:
        """Check the values, then return every cut tensor that is to be read.

        differing: the names of values that differed between ranks and that this rank takes from rank 0.
        """
        self._check_plain(values)
        model = self._model_tensors()
        found = [self._target(s, n) for n, s in model.items() if n in self._cuts]
        if self.job.optimizer is not None:
            names = parameter_names(self.root, self.state)
            self._check_class(class_of(self.job.optimizer), values["optimizer.class"])
            check_groups(self.job.optimizer, values["optimizer.groups"], names)
            found += self._moments(values, differing)
        return found

    def _model_tensors(self) -> dict[str, ParamSpec]:
        return {parameter_name(r.spec.name): r.spec for r in self.state.records.values()}

    def _check_model(self, values: set[str]) -> None:
        """Compare the names, shapes and dtypes of parameters, and the names of buffers."""
        model = self._model_tensors()
        plain = [*plain_tensors(self.root, self.state), *(n for n, _ in extra_states(self.root))]
        here = {*model, *plain}
        saved_names = (*self._cuts, *self._left_out, *values)
        there = {n for n in saved_names if n.startswith("model.")}
        problems = [f"{n} is missing in the checkpoint" for n in sorted(here - there)]
        problems += [f"{n} is not in the model" for n in sorted(there - here)]
        for name in sorted(here & there):
            if (name in model) != (name in self._cuts or name in self._left_out):
                one, other = ("model", "checkpoint")[:: 1 if name in model else -1]
                where = f"the {one} but not in the {other}"
                problems.append(f"{name} is sharded in {where}; ignore it in both or in neither")
            elif name in model:
                now = (model[name].whole_shape, model[name].home_dtype)
                shape, dtype = self._saved_as(name)
                if now != (shape, TORCH_DTYPES[dtype]):
                    problems.append(
                        f"{name} is {dtype} {shape} in the checkpoint, and here {now[1]} {now[0]}"
                    )
        self._raise_problems(problems)

    def _saved_as(self, name: str) -> tuple[tuple[int, ...], str]:
        """The shape and the dtype of a sharded parameter in the checkpoint."""
        if name in self._cuts:
            return self._cuts[name][0].whole_shape, self._cuts[name][0].dtype
        return self._left_out[name].shape, self._left_out[name].dtype

    def _check_plain(self, values: Mapping[str, Any]) -> None:
        problems = []
        for name, tensor in plain_tensors(self.root, self.state).items():
            saved = values[name]
            if not isinstance(saved, Tensor):
                problems.append(f"{name} is not a tensor in the checkpoint")
            elif (saved.dtype, saved.shape) != (tensor.dtype, tensor.shape):
                problems.append(
                    f"{name} is {saved.dtype} {tuple(saved.shape)} in the checkpoint, and here "
                    f"{tensor.dtype} {tuple(tensor.shape)}"
                )
        for name, weight in quantised_weights(self.root):
            there, _ = values.get("meanings", {}).get(name, ("plain", None))
            if there != (here := weight.recipe.meaning):
                problems.append(f"model.{name} is {there} in the checkpoint, and here {here}")
        self._raise_problems(problems)

    def own_marks(self) -> list[int]:
        """Return this rank's part of the mark of each parameter that was left out.

        Raises: CheckpointError for parameters without values.
        """
        by_name = {parameter_name(r.spec.name): r for r in self.state.records.values()}
        records = [by_name[name] for name in self._left_out]
        if unset := [r.spec.name for r in records if r.spec.key in self.state.unset.keys]:
            raise CheckpointError(
                f"the checkpoint in {self.folder} was saved with frozen=False, and "
                f"{unset[0]!r} (one of {len(unset)}) has no values yet; "
                "give the frozen parameters their values first, for example with fcdp_compile.load_pretrained"
            )
        return [self._mark(self.state, i, r.spec, r.peek()) for i, r in enumerate(records)]

    def check_marks(self, parts: Sequence[Sequence[int]]) -> None:
        """Compare the marks of the parameters that were left out with the model's.

        parts: the result of `own_marks` on each rank.
        """
        marks = [mark_of_all(of_one) for of_one in zip(*parts, strict=True)]
        saved = self._left_out.values()
        others = [s.name for s, mark in zip(saved, marks, strict=True) if s.mark != mark]
        if others:
            raise CheckpointError(
                f"the checkpoint in {self.folder} was saved with frozen=False, and {len(others)} of the "
                f"{len(marks)} frozen parameters that were not saved differ from their values at the save: "
                f"{', '.join(others[:8])}; give them the values with which the job began, for example "
                "with fcdp_compile.load_pretrained from the same files"
            )

    def _raise_problems(self, problems: list[str]) -> None:
        if problems:
            shown = "\n  ".join(problems)
            places = "1 place" if len(problems) == 1 else f"{len(problems)} places"
            raise CheckpointError(
                f"the model differs from the checkpoint in {self.folder} in {places}; build the model that "
                f"was saved. The differences:\n  {shown}"
            )

    def _check_class(self, here: str, saved: object) -> None:
        if here != saved:
            # The checkpoint's settings replace the optimizer's, also those in which AdamW differs from Adam.
            raise CheckpointError(
                f"the optimizer is {here}, but the checkpoint in {self.folder} was saved with {saved}; "
                "build the same optimizer, or leave optimizer=… out"
            )

    def _moments(
        self, values: Mapping[str, Any], differing: Collection[str]
    ) -> Iterator[WantedRows]:
        """Yield the tensors of the optimizer that are cut as their parameters are."""
        records = self.state.records.by_name
        names = {n for g in values["optimizer.groups"] for n in g["params"]}
        for parameter, of_one in values["optimizer.state"].items():
            if parameter not in names:
                raise CheckpointError(
                    f"{self.folder}: {parameter!r} has a state but is in no group"
                )
            for key, value in of_one.items():
                if not isinstance(value, TensorReference):
                    self._check_unmoved(parameter, key, value)
                    continue
                saved = self._cuts.get(value.name)
                spec = records[parameter].spec if parameter in records else None
                if saved is None or spec is None or saved[0].whole_shape != spec.whole_shape:
                    raise CheckpointError(
                        f"{self.folder}: {key!r} of parameter {parameter!r} is not saved in the shape of "
                        "the parameter; load an undamaged checkpoint, or leave optimizer=… out"
                    )
                yield self._target(spec, value.name)
        if "optimizer.state" in differing:
            ranks = told(self.record.layout)
            raise CheckpointError(
                f"the optimizer state in {self.folder} has values that differ between ranks, so only "
                f"{ranks} can load it; use {ranks}, or leave optimizer=… out"
            )

    def _check_unmoved(self, parameter: str, key: str, value: Any) -> None:
        """Refuse an optimizer value that depends on a rank's rows if the rank has other rows now."""
        spec = self._model_tensors().get(parameter_name(parameter))
        if spec is None or not isinstance(value, Tensor) or value.numel() < 2:
            return
        # The checkpoint does not say how a parameter that was left out was cut.
        saved = self._cuts.get(parameter_name(parameter))
        here = self.state.topology
        now = cut(parameter, "", spec, here.position, here.sharers, 0)
        is_cut_alike = saved is not None and _geometry(now) == _geometry(saved)
        if not self.is_same_layout or not is_cut_alike:
            layout = f"{told(self.record.layout)} and the same strategy"
            remedy = "" if saved is None else f"load with {layout}, or "
            raise CheckpointError(
                f"{self.folder}: {key!r} of parameter {parameter!r} depends on the layout that saved it; "
                f"{remedy}leave optimizer=… out"
            )

    def _target(self, spec: ParamSpec, name: str) -> WantedRows:
        home = self.state.topology.home(spec.strategy.home)
        tensors, boxes = self._cuts[name], spec.boxes(home.node, home.place)
        return WantedRows(name, TORCH_DTYPES[tensors[0].dtype], tensors, spec, boxes)


def told(layout: tuple[int, int, int]) -> str:
    """N, g and t in words."""
    nodes, ranks_per_node, tp = layout
    return f"{nodes} x {ranks_per_node} ranks" + (f" x tp={tp}" if tp > 1 else "")


def _geometry(tensors: Sequence[CutTensor]) -> list[Any]:
    """How a tensor is cut, without who has written it."""
    return [(t.shape, t.dim, t.rows, t.part_of) for t in tensors]


def restores(given: Any, saved: Any, path: str) -> Iterator[tuple[Any, Any]]:
    """Yield each object of a tree that takes a state, with its saved state.

    Raises: CheckpointError where the saved tree has no state for it.
    """
    if has_state(given):
        yield given, saved
    elif isinstance(given, dict):
        for key, item in given.items():
            found = saved.get(key, restores) if isinstance(saved, dict) else restores
            if found is not restores:
                yield from restores(item, found, f"{path}[{key!r}]")
            elif any(True for _ in restores(item, item, path)):
                raise CheckpointError(f"the checkpoint has no {path}[{key!r}] to load")
    elif isinstance(given, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(given):
            raise CheckpointError(f"the checkpoint has no {path} of {len(given)} items to load")
        for i, (item, found) in enumerate(zip(given, saved, strict=True)):
            yield from restores(item, found, f"{path}[{i}]")
