"""The examples' command lines, with one clear line for each mistake."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from fcdp_compile.strategy import Strategy

HEAD_DIM = 32
LORA_LR = 1e-2
CHECKPOINT_LORA_LR = 2e-4  # a rate for the example's small base would damage a well trained model


class UserError(Exception):
    """A mistake in the user's arguments; its message is the one line that is printed."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line of lora_finetune.py, and check it as far as one rank can alone."""
    parser = OneLineParser(
        description="Train a small Llama with FCDP, fine-tune it with LoRA, count the bytes between nodes."
    )
    number = parser.add_argument_group("size of the job")
    number.add_argument(
        "--base-steps", type=positive, default=100, metavar="STEPS", help="(%(default)s)"
    )
    number.add_argument("--steps", type=positive, default=60, help="LoRA steps (%(default)s)")
    add_size_arguments(number)
    number.add_argument("--base-lr", type=rate, default=3e-3, metavar="LR", help="(%(default)s)")
    number.add_argument(
        "--lr",
        type=rate,
        help=f"learning rate of LoRA ({LORA_LR}, with --model {CHECKPOINT_LORA_LR})",
    )
    real = parser.add_argument_group("your own input")
    real.add_argument("--data", type=Path, metavar="FOLDER", help="text to fine-tune on")
    real.add_argument(
        "--model", type=Path, metavar="FOLDER", help="checkpoint to fine-tune; skips the base phase"
    )
    add_how_arguments(parser)
    args = parser.parse_args()
    if args.lr is None:
        args.lr = LORA_LR if args.model is None else CHECKPOINT_LORA_LR
    check(args)
    return args


def add_size_arguments(number: argparse._ArgumentGroup) -> None:
    """Declare the sizes of the model and its batches."""
    number.add_argument("--batch-size", type=positive, default=4, help="per rank (%(default)s)")
    number.add_argument("--seq-len", type=positive, default=128, help="tokens (%(default)s)")
    number.add_argument("--layers", type=positive, default=4, help="(%(default)s)")
    number.add_argument("--hidden", type=positive, default=256, help="(%(default)s)")
    number.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def add_how_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how the model is sharded and compiled."""
    how = parser.add_argument_group("how it is sharded and compiled")
    how.add_argument("--nodes", type=positive, help="nodes to split one machine's ranks into")
    how.add_argument("--strategy", type=strategy, default="fcdp", help="(%(default)s)")
    how.add_argument(
        "--compute",
        choices=("inductor", "eager"),
        help="how operators run (default: the backend decides)",
    )
    how.add_argument(
        "--survive", action="store_true", help="keep each step in the memory of the nodes"
    )
    how.add_argument("--dump", type=Path, metavar="FOLDER", help="where plans go, for `fcdp dump`")


def check(args: argparse.Namespace) -> None:
    """Refuse arguments that one rank alone can recognise as wrong.

    Raises: UserError.
    """
    if args.hidden % HEAD_DIM:
        raise UserError(f"--hidden {args.hidden} is not a multiple of the head size, {HEAD_DIM}")
    if args.seq_len < 2:
        raise UserError("--seq-len 1 leaves no token to predict; give at least 2")
    if args.model is not None and not (args.model / "config.json").is_file():
        raise UserError(f"--model {args.model} is not a checkpoint: it has no config.json")
    if args.dump is not None and args.dump.exists() and not args.dump.is_dir():
        raise UserError(f"--dump {args.dump} is a file; name a folder")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if args.nodes is not None and world_size % args.nodes:
        raise UserError(
            f"--nodes {args.nodes} does not divide the number of processes, {world_size}; "
            f"start a multiple of {args.nodes} with torchrun --nproc-per-node"
        )


class OneLineParser(argparse.ArgumentParser):
    """A parser whose error is one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def positive(text: str) -> int:
    """Parse a count."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def rate(text: str) -> float:
    """Parse a learning rate."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def strategy(text: str) -> str:
    """Parse the name of a strategy."""
    try:
        return Strategy.parse(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@contextlib.contextmanager
def user_mistakes() -> Iterator[None]:
    """Turn the library's errors about its arguments into the one line."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


def refuse(message: str) -> NoReturn:
    """Print one line for all ranks of this machine and exit with code 2.

    torchrun ends the other ranks as soon as one exits, so the first rank must exit first, after its line; a
    rank that is still alive after a while found a mistake that the first one did not.
    """
    if int(os.environ.get("LOCAL_RANK", "0")):
        time.sleep(20)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    # Not sys.exit: the process group's destructors would wait for ranks that are gone.
    os._exit(2)
