"""A script as a user of transformers.Trainer writes it, and the script with one line changed.

The script is text, so that the change is the one that a user would make.
"""

from __future__ import annotations

import torch

IMPORT = "from transformers import Trainer"
CHANGED = "from fcdp_compile.integrations.transformers import Trainer"

SCRIPT = """
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers import Trainer

VOCABULARY = 199


def build(lora, dropout=0.0):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=60, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        attention_dropout=dropout,
    )
    model = LlamaForCausalLM(config)
    if not lora:
        return model
    adapted = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, adapted)


def sentences(count, seed, uneven):
    generator = torch.Generator().manual_seed(seed)
    for i in range(count):
        length = 5 + i % 7 if uneven else 12
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    padded = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.stack([
            torch.nn.functional.pad(row[name], (0, longest - len(row[name])), value=value) for row in rows
        ])
        for name, value in padded.items()
    }
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    return batch


arguments = {
    "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
    "learning_rate": 1e-3, "adam_epsilon": 1e-5, "dataloader_pin_memory": False, "seed": 7,
    "per_device_train_batch_size": 2, "max_steps": 3, "include_num_input_tokens_seen": "all",
}
trainer = Trainer(
    model=build(LORA, **MODEL),
    args=TrainingArguments(output_dir=FOLDER, **{**arguments, **ARGUMENTS}),
    data_collator=collate,
    train_dataset=list(sentences(37, 1, UNEVEN)),
    eval_dataset=list(sentences(11, 2, UNEVEN)),
    **TRAINER,
)
trainer.train(resume_from_checkpoint=RESUME)
"""
"""`run_script` sets the names in capitals, which vary the script."""


def run_script(
    folder: object,
    *,
    changed: bool,
    lora: bool = False,
    uneven: bool = False,
    model: dict[str, object] | None = None,
    resume: object = None,
    trainer: dict[str, object] | None = None,
    **arguments: object,
) -> dict[str, object]:
    """Run the script with these training arguments; returns its global names, such as `trainer`.

    changed: with the one line changed.  lora: train adapters.  uneven: on sentences of different lengths.
    """
    assert SCRIPT.count(IMPORT + "\n") == 1
    torch._dynamo.reset()
    names: dict[str, object] = {
        "FOLDER": str(folder), "LORA": lora, "UNEVEN": uneven, "RESUME": resume,
        "ARGUMENTS": arguments, "MODEL": model or {}, "TRAINER": trainer or {},
    }  # fmt: skip
    exec(SCRIPT.replace(IMPORT + "\n", CHANGED + "\n") if changed else SCRIPT, names)
    return names
