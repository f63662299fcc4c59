"""What `PreTrainedModel.save_pretrained` would write of a model, without its values."""

from __future__ import annotations

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fcdp_compile.errors import FcdpError
from fcdp_compile.pretrained.exporting.contents import Contents, index_writer
from fcdp_compile.pretrained.exporting.shard_files import split
from fcdp_compile.pretrained.exporting.tape import Tape


def transformers_contents(
    model: Any, tape: Tape[Any], state: dict[str, Tensor], max_shard_bytes: int
) -> Contents:
    """Of a Transformers model.

    state: leaves of the tape by the names of the model's state dict, tied ones the same leaf.

    Raises: FcdpError for a quantised model, and for one whose checkpoint format needs values to be undone.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        raise FcdpError(
            f"{type(model).__name__} is quantised, and fcdp does not export quantised weights; load the "
            "model without quantisation"
        )
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = without_ties(model, {n: t for n, t in state.items() if n not in ignored})
    files = split("model", _as_in_checkpoints(model, tape, kept), max_shard_bytes)
    write = index_writer(files, "model", model.num_parameters())

    def describe(folder: Path) -> None:
        write(folder)
        _describe(model, folder)

    return Contents(tape=tape, files=files, describe=describe)


def without_ties(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the names that `from_pretrained` ties to others.

    A tensor that the user has given several names is kept under each: it would otherwise be missed there.
    """
    # Only where the configuration ties them: classes declare ties that it may have switched off.
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return {
        name: tensor
        for name, tensor in state.items()
        if not (name in ties and ties[name] != name and state.get(ties[name]) is tensor)
    }


def _as_in_checkpoints(
    model: nn.Module, tape: Tape[Any], state: dict[str, Tensor]
) -> dict[str, Tensor]:
    # Transformers builds some models otherwise than their checkpoints: experts as one tensor, for example.
    loading = import_module("transformers.core_model_loading")
    with tape:
        reverted: dict[str, Tensor] = loading.revert_weight_conversion(model, state)
    if unknown := next((name for name, t in reverted.items() if not tape.knows(t)), None):
        raise FcdpError(
            f"transformers makes {unknown!r} of its checkpoints for {type(model).__name__} of something "
            "that is no parameter or buffer; save the model's state_dict with fcdp_compile.save instead"
        )
    return reverted


def _describe(model: Any, folder: Path) -> None:
    """Write the configuration, and the code of a model that the hub would load code for."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        code = import_module("transformers.dynamic_module_utils")
        code.custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
