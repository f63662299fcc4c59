"""Train a small Llama on preferences with TRL's DPOTrainer on FCDP; the reference model is sharded, too.

    torchrun --standalone --nproc-per-node=4 examples/dpo.py --nodes 2 --steps 4
    python examples/dpo.py --steps 4 --lora

Nothing is downloaded: the model has random weights, and the text comes with Python. A pair is a passage that
goes on as the text does, and one that goes on with random words. The reference model crosses between nodes
in its first use, and never again. With --lora there is no second model: the policy without its adapters is
the reference.
"""

from __future__ import annotations

import copy
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForCausalLM
from trl import DPOConfig

from alignment import (
    BytesOfModels,
    finish,
    parser_of,
    passages,
    quiet,
    small_config,
    tokenizer_of,
)
from fcdp_compile.integrations.trl import DPOTrainer, FcdpOptions

PROMPT, COMPLETION = 12, 8  # words
PAIRS = 512


def main() -> None:
    """Train, save, report the bytes."""
    parser = parser_of("Train on preferences with TRL's DPOTrainer on FCDP.")
    parser.add_argument("--lora", action="store_true", help="train adapters, without a reference")
    args = parser.parse_args()
    quiet()
    # Accelerate finds GPUs by itself, but must be told to use CPUs.
    use_cpu = not torch.cuda.is_available()
    texts = passages(PROMPT + COMPLETION)
    tokenizer = tokenizer_of(texts)
    torch.manual_seed(0)  # the same weights in every process
    policy = LlamaForCausalLM(small_config(tokenizer))
    reference = None if args.lora else copy.deepcopy(policy)
    trainer = DPOTrainer(
        model=policy,
        ref_model=reference,
        args=DPOConfig(
            output_dir=str(args.output or "dpo_output"),
            max_steps=args.steps,
            per_device_train_batch_size=4,
            learning_rate=args.lr,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            gradient_checkpointing=False,
            bf16=not use_cpu,
            use_cpu=use_cpu,
            dataloader_pin_memory=not use_cpu,
        ),
        train_dataset=pairs(texts),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, task_type="CAUSAL_LM") if args.lora else None,
        fcdp=FcdpOptions(nodes=args.nodes, strategy=args.strategy),  # by default: torchrun's nodes
    )
    policy = trainer.model  # with --lora now with adapters
    counted = BytesOfModels({"policy": policy, **({"reference": reference} if reference else {})})
    trainer.add_callback(counted)
    trainer.train()
    finish(trainer, counted, args.output)


def pairs(texts: list[list[str]]) -> Dataset:
    """Make the pairs, the same in every process."""
    draw = random.Random(0)
    words = sorted({word for text in texts for word in text})
    rows = [
        {
            "prompt": " ".join(text[:PROMPT]) + " ",
            "chosen": " ".join(text[PROMPT:]),
            "rejected": " ".join(draw.choices(words, k=COMPLETION)),
        }
        for text in texts[:PAIRS]
    ]
    return Dataset.from_list(rows)


if __name__ == "__main__":
    main()
