"""What `PeftModel.save_pretrained` would write of a model's adapters, without their values."""

from __future__ import annotations

import copy
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from fcdp_compile.errors import FcdpError
from fcdp_compile.pretrained.exporting.contents import Contents, Leaves
from fcdp_compile.pretrained.exporting.shard_files import TensorFile
from fcdp_compile.pretrained.exporting.tape import Tape
from fcdp_compile.pretrained.exporting.twin import Twins

_FILE = "adapter_model.safetensors"


def adapter_contents(model: Any, leaves: Leaves, folder: Path) -> Contents:
    """Of a PEFT model: every adapter, the one called "default" in the folder itself, others below it.

    folder: where they will be, for the model card that is there already.
    """
    peft = import_module("peft")
    state = leaves.of_state_dict(model)
    # Prompt encoders are run for what they come to; the model's own would run on home shards.
    twin = Twins(lambda tensor: leaves.of("a tensor of PEFT's", tensor)).of(model)
    files = []
    for name in model.peft_config:
        with leaves.tape:
            tensors = peft.get_peft_model_state_dict(
                twin, state_dict=dict(state), adapter_name=name
            )
        files.append(TensorFile(name=_below(name) + _FILE, tensors=_known(leaves.tape, tensors)))

    def describe(aside: Path) -> None:
        if (folder / "README.md").is_file():  # PEFT adds to it
            shutil.copyfile(folder / "README.md", aside / "README.md")
        model.create_or_update_model_card(str(aside))
        for name in model.peft_config:
            _describe(model, name, aside / _below(name))

    return Contents(tape=leaves.tape, files=files, describe=describe)


def attached_adapter_contents(model: Any, leaves: Leaves) -> Contents:
    """Of a Transformers model that adapters were added to (`add_adapter`): the active one, as it does.

    Raises: FcdpError for several active ones, which one file cannot hold.
    """
    active = model.active_adapters()
    if len(active) != 1:
        raise FcdpError(
            f"the adapters {active} are active, and a folder holds one; choose it with set_adapter and save "
            "them one after the other"
        )
    state = leaves.of_state_dict(model)
    with leaves.tape:
        tensors = model.get_adapter_state_dict(active[0], state_dict=dict(state))
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}

    def describe(aside: Path) -> None:
        if model.can_generate():
            model.generation_config.save_pretrained(aside)
        model.peft_config[active[0]].save_pretrained(str(aside))

    files = [TensorFile(name=_FILE, tensors=_known(leaves.tape, named))]
    return Contents(tape=leaves.tape, files=files, describe=describe)


def _below(adapter: str) -> str:
    return "" if adapter == "default" else f"{adapter}/"


def _known(tape: Tape[Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if unknown := next((name for name, t in tensors.items() if not tape.knows(t)), None):
        raise FcdpError(
            f"PEFT makes {unknown!r} of its adapter of something that is no parameter or buffer of the "
            "model, which fcdp cannot gather"
        )
    return tensors


def _describe(model: Any, adapter: str, folder: Path) -> None:
    """Write an adapter's configuration as PeftModel.save_pretrained does."""
    config = copy.copy(model.peft_config[adapter])
    is_prompt = config.is_prompt_learning
    base = model.base_model if is_prompt else model.base_model.model
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path", None) or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)
