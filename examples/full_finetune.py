"""Train all parameters of a language model, from scratch or from a Hugging Face folder, and export it.

    on "meta" ─▶ shard ─▶ load_pretrained, materialize ─▶ train, save ─▶ save_pretrained ─▶ --output

No rank holds the whole model while it is made, loaded or saved; the rank that exports it holds it on its
host.

On one machine as four processes that act as two nodes (CPU or GPU), or as one plain process; on several
machines as slurm.sbatch starts it:

    torchrun --standalone --nproc-per-node=4 examples/full_finetune.py --nodes 2 --output trained
    python examples/full_finetune.py --model FOLDER --data TEXTS --output trained

With --checkpoint it saves during training, and continues from that checkpoint when it is started again, on
any number of nodes.  torchrun restarts it when a rank dies: torchrun --max-restarts=2 ….  With --survive it
then goes on from the memory of the nodes, at most two steps back.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

import fcdp_compile
from arguments import (
    OneLineParser,
    UserError,
    add_how_arguments,
    add_size_arguments,
    check,
    positive,
    rate,
    refuse,
    user_mistakes,
)
from causal_lm import (
    check_lengths,
    checkpoint_mistakes,
    encoder_of,
    load_tokenizer,
    lr_factor,
    small_config,
)
from corpus import MIB, CorpusError, Windows, base_text, encode_bytes, folder_text
from measure import Phase, Place, local_device, report

SCRATCH_LR = 3e-3
CHECKPOINT_LR = 2e-5  # a rate for a small model from scratch would damage a well trained one
CORPUS_LIMIT_BYTES = 2 * MIB
RECORD = "checkpoint.json"  # the last file that fcdp_compile.save writes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The objects of a training run, made or loaded before its first step.

    start: how many steps were done before.  keeper: with --survive.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    windows: Windows
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    place: Place
    start: int
    keeper: fcdp_compile.Keeper | None


def main() -> int:
    """Run the job; for a user's mistake, print one line and exit with code 2."""
    try:
        run(parse_arguments())
    except (UserError, CorpusError, fcdp_compile.CheckpointError) as error:
        refuse(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line, and check it as far as one rank can alone."""
    parser = OneLineParser(
        description="Train all parameters of a language model with FCDP and export it."
    )
    number = parser.add_argument_group("size of the job")
    number.add_argument("--steps", type=positive, default=60, help="(%(default)s)")
    add_size_arguments(number)
    number.add_argument("--lr", type=rate, help=f"({SCRATCH_LR}, with --model {CHECKPOINT_LR})")
    files = parser.add_argument_group("what is read and written")
    files.add_argument("--data", type=Path, metavar="FOLDER", help="text to train on")
    files.add_argument("--model", type=Path, metavar="FOLDER", help="checkpoint to start from")
    files.add_argument("--output", type=Path, metavar="FOLDER", help="where to export the model")
    files.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="save there, and go on from what is there"
    )
    files.add_argument(
        "--save-every", type=positive, default=20, metavar="STEPS", help="(%(default)s)"
    )
    add_how_arguments(parser)
    args = parser.parse_args()
    if args.lr is None:
        args.lr = SCRATCH_LR if args.model is None else CHECKPOINT_LR
    check(args)
    return args


def run(args: argparse.Namespace) -> None:
    """Prepare, train, export, report."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    job = prepare(args)
    phase = train(job, args)
    if args.output is not None:
        fcdp_compile.save_pretrained(
            job.model, args.output, tokenizer=job.tokenizer, progress=job.place.rank == 0
        )
    if job.keeper is not None:
        job.keeper.close()
    if job.place.rank == 0 and phase is not None:
        print(report([phase], nodes=job.place.nodes, strategy=args.strategy), flush=True)
    if dist.is_initialized():
        dist.barrier()  # keep the group until all ranks are done
        dist.destroy_process_group()


def prepare(args: argparse.Namespace) -> TrainingRun:
    """Build the model without memory, shard it, and only then give it values."""
    # Text first, to refuse a folder without text before minutes of loading.
    if args.data is None:
        text = base_text(seed=args.seed, limit_bytes=CORPUS_LIMIT_BYTES)
    else:
        text = folder_text(args.data, seed=args.seed, limit_bytes=CORPUS_LIMIT_BYTES)
    device = local_device()
    with user_mistakes():
        mesh = fcdp_compile.make_mesh(**({} if args.nodes is None else {"nodes": args.nodes}))
    place = Place.find(mesh, device)

    tokenizer, config, encode = None, small_config(args), encode_bytes
    if args.model is not None:
        with checkpoint_mistakes(args.model):
            tokenizer = load_tokenizer(args.model)
            config = AutoConfig.from_pretrained(args.model, local_files_only=True)
        config.use_cache = False
        encode = encoder_of(tokenizer)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if tokenizer is not None:
        check_lengths(model, tokenizer, args)
    model.train()
    with user_mistakes():
        fcdp_compile.shard(model, mesh, strategy=args.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, args.steps))
    torch.manual_seed(args.seed)

    def begin() -> int:
        return first_values(model, optimizer, scheduler, args, place)

    keeper = None
    if args.survive:
        with user_mistakes():
            keeper = fcdp_compile.survive(model, optimizer, base=begin, scheduler=scheduler)
        start = keeper.step
    else:
        start = begin()
    return TrainingRun(
        model=model,
        tokenizer=tokenizer,
        windows=Windows.cut(text, encode, length=args.seq_len),
        optimizer=optimizer,
        scheduler=scheduler,
        place=place,
        start=start,
        keeper=keeper,
    )


def first_values(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    args: argparse.Namespace,
    place: Place,
) -> int:
    """Load the last checkpoint or --model, or make new values; returns how many steps are done."""
    done = 0
    if place.all_agree(args.checkpoint is not None and (args.checkpoint / RECORD).exists()):
        loaded = fcdp_compile.load(
            args.checkpoint, model=model, optimizer=optimizer, scheduler=scheduler
        )
        done = int(loaded.step)
        if place.rank == 0:
            print(f"going on after step {done} of {args.checkpoint}")
    elif args.model is not None:
        fcdp_compile.load_pretrained(model, args.model, progress=place.rank == 0)
    # Fill values that no file has: all of them from scratch, else tables such as those of positions.
    fcdp_compile.materialize(model)
    return done


def train(job: TrainingRun, args: argparse.Namespace) -> Phase | None:
    """Train from the first step or from the last checkpoint; None if there is nothing left to do."""
    model, place = job.model, job.place
    total_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    options = {} if args.compute is None else {"compute": args.compute}
    if args.dump is not None:
        options["dump"] = str(args.dump)
    compiled = torch.compile(model, backend="fcdp", options=options)

    losses: list[float] = []
    sent_bytes: list[int] = []
    began_s = time.perf_counter()
    pending = None
    steps = range(job.start, args.steps)
    for step in tqdm(steps, desc="training", disable=place.rank != 0, dynamic_ncols=True):
        batch = job.windows.batch(
            step,
            size=args.batch_size,
            rank=place.rank,
            world_size=place.world_size,
            seed=args.seed,
        ).to(place.device)
        loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        job.optimizer.step()
        job.scheduler.step()
        job.optimizer.zero_grad()
        if job.keeper is not None:
            job.keeper.commit()
        sent_bytes.append(fcdp_compile.traffic(model).last_step.bytes(link="inter"))
        losses.append(place.average(loss.item()))
        if step == job.start:
            began_s = time.perf_counter()  # the first step compiles
        if args.checkpoint is not None and (step + 1) % args.save_every == 0:
            pending = save(job, args.checkpoint, step + 1)
    took_s = time.perf_counter() - began_s
    if pending is not None:
        pending.wait()
    if not losses:
        return None
    tokens = (len(losses) - 1) * args.batch_size * args.seq_len * place.world_size
    return Phase(
        name="training",
        losses=losses,
        sent_bytes=place.per_node(sent_bytes),
        parameter_bytes=total_bytes,
        trainable_bytes=total_bytes,
        tokens_per_s=tokens / took_s,
    )


def save(job: TrainingRun, folder: Path, step: int) -> fcdp_compile.PendingSave:
    """Start to write a checkpoint while training continues."""
    return fcdp_compile.save(
        folder,
        model=job.model,
        optimizer=job.optimizer,
        scheduler=job.scheduler,
        step=step,
        asynchronous=True,
    )


if __name__ == "__main__":
    sys.exit(main())
