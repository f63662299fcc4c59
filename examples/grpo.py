"""Train a small Llama with TRL's GRPOTrainer on FCDP: policy, reference and reward model share one mesh.

    torchrun --standalone --nproc-per-node=4 examples/grpo.py --nodes 2 --steps 4
    python examples/grpo.py --steps 4

Nothing is downloaded: the models have random weights, and the prompts come with Python. A completion is
rewarded for frequent words, and a little by a frozen reward model. The policy generates in its own processes.

Policy, reference and reward model may have different strategies: --strategy is the policy's, and
--companion-strategy the one of both frozen models. They share lanes and host memory.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)
from trl import GRPOConfig

from alignment import (
    BytesOfModels,
    finish,
    parser_of,
    passages,
    quiet,
    small_config,
    tokenizer_of,
)
from fcdp_compile.integrations.trl import FcdpOptions, GRPOTrainer

PROMPT, COMPLETION = 12, 12  # words
FREQUENT = 64
"""Words with a smaller number than this are frequent."""


def main() -> None:
    """Train, save, report the bytes."""
    parser = parser_of("Train against rewards with TRL's GRPOTrainer on FCDP.")
    parser.add_argument(
        "--companion-strategy", default="fcdp", help="of reference and reward model (%(default)s)"
    )
    args = parser.parse_args()
    quiet()
    texts = passages(PROMPT)
    tokenizer = tokenizer_of(texts)
    torch.manual_seed(0)  # the same weights in every process
    reward_model = LlamaForSequenceClassification(small_config(tokenizer, num_labels=1))
    reward_model.config.name_or_path = "reward-model"  # TRL's logs show it
    # TRL loads the reference model from the folder that the policy came from.
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(small_config(tokenizer)).save_pretrained(folder)
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=[frequent_words, reward_model],
            reward_processing_classes=[None, tokenizer],
            args=training_arguments(args),
            train_dataset=Dataset.from_list([{"prompt": " ".join(text)} for text in texts[:512]]),
            processing_class=tokenizer,
            fcdp=FcdpOptions(
                nodes=args.nodes,  # by default: torchrun's nodes
                strategy=args.strategy,
                companion_strategy=args.companion_strategy,
            ),
        )
    reference = trainer.ref_model
    counted = BytesOfModels({"policy": policy, "reference": reference, "reward": reward_model})
    trainer.add_callback(counted)
    trainer.train()
    finish(trainer, counted, args.output)


def frequent_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the share of frequent words in each completion."""
    return [sum(i < FREQUENT for i in ids) / max(1, len(ids)) for ids in completion_ids]


def training_arguments(args: argparse.Namespace) -> GRPOConfig:
    """Make TRL's arguments from the command line."""
    # Accelerate finds GPUs by itself, but must be told to use CPUs.
    use_cpu = not torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(args.output or "grpo_output"),
        max_steps=args.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=COMPLETION,
        beta=0.02,  # above 0 there is a reference model
        reward_weights=[1.0, 0.1],
        learning_rate=args.lr,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        bf16=not use_cpu,
        use_cpu=use_cpu,
        dataloader_pin_memory=not use_cpu,
    )


if __name__ == "__main__":
    main()
