"""The table of the zoo: models, ways to train them, and changes between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tests.distributed.models import Case, checkpointing
from tests.zoo import adapters
from tests.zoo.adapters import Act, Adapt
from tests.zoo.architectures import ARCHITECTURES, VOCABULARY


@dataclass(frozen=True, kw_only=True)
class ZooCase:
    """One row: an architecture and a way to train it.

    between: changes of the model before a step, by the step's number.  at_step: a change in each step, after
    its backward; gets the model and the step's number.  evaluated: steps that only compute a loss.
    is_default: whether it runs with the other tests, not only on request.
    refused: text of the error that must stop every rank; None if the case works.
    remark: for the table in the docs.
    """

    architecture: str
    method: str
    adapt: Adapt
    is_checkpointed: bool = False
    between: Mapping[int, Act] = field(default_factory=dict)
    at_step: Callable[[Any, int], None] | None = None
    evaluated: tuple[int, ...] = ()
    steps: int = 4
    is_default: bool = False
    refused: str | None = None
    remark: str = ""

    def built(self) -> Case:
        """The case that `beside.Beside` takes."""
        loss = ARCHITECTURES[self.architecture].loss
        return Case(model=self._model, loss=loss, vocabulary=VOCABULARY)

    def _model(self) -> nn.Module:
        kind = ARCHITECTURES[self.architecture]
        model = self.adapt(kind.model(), kind.targets)
        return checkpointing(model) if self.is_checkpointed else model


_WAYS: dict[str, Adapt] = {"full": adapters.whole, "LoRA": adapters.lora}
_CHECKPOINTED = ("llama", "gpt2", "mixtral", "t5")

_DEFAULT = ("qwen3-moe-full", "t5-full", "whisper-lora", "vit-full", "bert-lora")
_REFUSED = "compiled different plans; make every rank run the same model|every rank use the same parameters"
_REMARKS = {
    "mixtral": '`experts_implementation="grouped_mm"`, the default',
    "mixtral-router": "`output_router_logits=True`: Dynamo cannot trace how transformers collects them",
    "qwen3-moe": '`experts_implementation="batched_mm"`, `output_router_logits=True`',
    "vit": "the first loss sets `config.problem_type`, so the second step compiles again",
    "mixtral-loop": '`experts_implementation="eager"`: each rank visits the experts that its own tokens '
    "chose, so ranks gather different parameters; use another implementation",
}


def _case(architecture: str, method: str, *, is_checkpointed: bool = False) -> ZooCase:
    name = f"{architecture}-{method.lower()}"
    return ZooCase(
        architecture=architecture,
        method=f"{method}, checkpointing" if is_checkpointed else method,
        adapt=_WAYS[method],
        is_checkpointed=is_checkpointed,
        is_default=name in _DEFAULT and not is_checkpointed,
        refused=_REFUSED if architecture == "mixtral-loop" else None,
        remark=_REMARKS.get(architecture, ""),
    )


def _on_llama(method: str, adapt: Adapt, **more: Any) -> ZooCase:
    return ZooCase(architecture="llama", method=method, adapt=adapt, **more)


ZOO: dict[str, ZooCase] = {
    **{f"{name}-{way.lower()}": _case(name, way) for name in ARCHITECTURES for way in _WAYS},
    **{
        f"{name}-{way.lower()}-checkpointed": _case(name, way, is_checkpointed=True)
        for name in _CHECKPOINTED
        for way in _WAYS
    },
    "llama-rslora": _on_llama("rsLoRA", adapters.rslora),
    "llama-dora": _on_llama("DoRA", adapters.dora),
    "llama-lora-head": _on_llama(
        "LoRA and whole head, embedding",
        adapters.lora_and_whole_head,
        remark="the original head and embedding, which PEFT keeps beside the trained ones, are unused",
    ),
    "llama-ia3": _on_llama("IA3", adapters.ia3, is_default=True),
    "llama-adalora": _on_llama(
        "AdaLoRA",
        adapters.adalora,
        at_step=adapters.allocate,
        steps=6,
        is_default=True,
        remark="`update_and_allocate` in each step",
    ),
    "llama-prompt": _on_llama("prompt tuning", adapters.prompt_tuning),
    "llama-prefix": _on_llama("prefix tuning", adapters.prefix_tuning),
    "llama-both": _on_llama("two LoRAs at once", adapters.both_active),
    "llama-switched": _on_llama(
        "two LoRAs, switched",
        adapters.two_adapters,
        between={2: adapters.switch_to("other"), 4: adapters.switch_to("default")},
        steps=6,
        remark="`set_adapter` before steps 2 and 4",
    ),
    "llama-deleted": _on_llama(
        "two LoRAs, one deleted",
        adapters.two_adapters,
        between={2: adapters.delete("other")},
        remark="`delete_adapter` before step 2; its parameters are those outside",
    ),
    "llama-merged": _on_llama(
        "LoRA, merged and unmerged",
        adapters.lora,
        between={2: adapters.merge, 3: adapters.unmerge},
        evaluated=(2,),
        steps=5,
        remark="`merge_adapter`, an evaluation, `unmerge_adapter`, on sharded parameters",
    ),
    "llama-dora-merged": _on_llama(
        "DoRA, merged and unmerged",
        adapters.dora,
        between={2: adapters.merge, 3: adapters.unmerge},
        evaluated=(2,),
        steps=5,
        is_default=True,
        remark="the same",
    ),
    "llama-relora": _on_llama(
        "LoRA, merged and begun anew",
        adapters.lora,
        between={2: adapters.merge_and_start_anew},
        steps=5,
        remark="as ReLoRA: the frozen base changes",
    ),
    "llama-unloaded": _on_llama(
        "LoRA, unloaded, then full",
        adapters.lora,
        between={2: adapters.merge_and_unload},
        remark="`merge_and_unload`, and all of what is left is trained",
    ),
    "llama-unfrozen": _on_llama(
        "LoRA, then everything", adapters.lora, between={2: adapters.unfreeze_all}
    ),
}
