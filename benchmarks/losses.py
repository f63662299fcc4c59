"""What fewer bits of gradients and weights do to the loss: fine-tuning in one process, as if on nodes.

    python -m benchmarks.losses --model llama --mode full --seeds 0 1 2

A byte-level model learns Python's own library, and is then fine-tuned on C headers with AdamW.  Each node has
batches of its own; all runs have the same.  Gradients and weights pass through the codecs that are used
between nodes.  For comparison: whole levels in blocks of 256 values, with and without error feedback.
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
from tabulate import tabulate
from torch import Tensor, nn

from fcdp_compile.runtime.collectives.quantize import Codec
from fcdp_compile.strategy.formats import Format

Send = Callable[[int, Tensor], Tensor]
"""What other nodes get of a tensor, whose number is given."""

_WIDTH, _LAYERS, _BATCH, _LENGTH = 96, 3, 2, 64
_EVALUATED = 50


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description="Losses with fewer bits.")
    add = parser.add_argument
    add("--model", choices=("llama", "gpt"), default="llama")
    add("--mode", choices=("full", "lora"), default="full")
    add("--lr", type=float, help="default 1e-4; LoRA 1e-3")
    add("--steps", type=int, default=2000)
    add("--pretraining", type=int, default=1500, help="steps")
    add("--nodes", type=int, default=2)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    args = parser.parse_args()
    args.lr = args.lr or {"full": 1e-4, "lora": 1e-3}[args.mode]
    torch.set_num_threads(1)
    found = [list(_losses(seed, args)) for seed in args.seeds]
    rows = []
    for name, *runs in zip(args.strategies, *found, strict=True):
        more = [
            [100 * (mine[i] / exact[0][i] - 1) for mine, exact in zip(runs, found, strict=True)]
            for i in range(2)
        ]
        means = [fmean(run[i] for run in runs) for i in range(2)]
        rows.append((name, means[0], fmean(more[0]), means[1], fmean(more[1]), max(more[1])))
    headers = ("strategy", "training", "more %", "evaluation", "more %", "most %")
    print(tabulate(rows, headers=headers, floatfmt=("", ".4f", "+.3f", ".4f", "+.3f", "+.3f")))


# --- what is sent -------------------------------------------------------------------------------------------


def _exact(number: int, values: Tensor) -> Tensor:
    return values


def _coded(wire: Format) -> Callable[[], Send]:
    def make() -> Send:
        codecs: dict[int, Codec] = {}

        def send(number: int, values: Tensor) -> Tensor:
            codec = codecs.setdefault(values.numel(), Codec(wire, [values.numel()]))
            return codec.decode(codec.encode(values.reshape(1, -1)), values.dtype).view_as(values)

        return send

    return make


def _whole(number: int, values: Tensor) -> Tensor:
    """Values in 15 even levels, in blocks of 256."""
    blocks = nn.functional.pad(values.flatten(), (0, -values.numel() % 256)).view(-1, 256)
    scales = blocks.abs().amax(1, keepdim=True).div(7).clamp_min(2.0**-126)
    return (blocks / scales).round().mul(scales).flatten()[: values.numel()].view_as(values)


def _fed_back(send: Send, share: float) -> Callable[[], Send]:
    """What was lost is added to the next values; as a moving mean, if the share is less than 1."""

    def make() -> Send:
        lost: dict[int, Tensor] = {}

        def with_errors(number: int, values: Tensor) -> Tensor:
            before = lost.get(number, torch.zeros_like(values))
            sent = send(number, values + before)
            lost[number] = before + share * (values + before - sent - before)
            return sent

        return with_errors

    return make


_G4, _W8 = _coded(Format.INT4), _coded(Format.INT8)
STRATEGIES: dict[str, tuple[Callable[[], Send], Callable[[], Send]]] = {
    "exact": (lambda: _exact, lambda: _exact),
    "g4": (lambda: _exact, _G4),
    "w8+g4": (_W8, _G4),
    "even levels": (lambda: _exact, lambda: _whole),
    "even levels, w8": (_W8, lambda: _whole),
    "even levels, error fed back": (lambda: _exact, _fed_back(_whole, 1.0)),
    "even levels, mean error fed back": (lambda: _exact, _fed_back(_whole, 0.05)),
}
"""What makes the senders of weights and of one node's gradients, by the name of the strategy."""


# --- training -----------------------------------------------------------------------------------------------


def _losses(seed: int, args: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """The mean loss of the last tenth of training, and of an evaluation, for each strategy."""
    library = _text(Path(sysconfig.get_paths()["stdlib"]), "*.py")
    headers = _text(Path(sysconfig.get_paths()["include"]), "**/*.h")
    model = _pretrained(args, library, seed)
    for name in args.strategies:
        weights, *gradients = (make() for make in _senders(name, args.nodes))
        torch.manual_seed(seed)
        net = _with_adapters(copy.deepcopy(model)) if args.mode == "lora" else copy.deepcopy(model)
        cut = len(headers) * 8 // 10
        losses = _train(net, headers[:cut], weights, gradients, seed, args)
        batches = _batches(headers[cut:], 10**6, 16)
        with torch.no_grad():
            evaluated = [
                net(input_ids=ids, labels=ids).loss.item()
                for ids, _ in zip(batches, range(_EVALUATED), strict=False)
            ]
        yield fmean(losses[-len(losses) // 10 :]), fmean(evaluated)


def _senders(name: str, nodes: int) -> list[Callable[[], Send]]:
    weights, gradients = STRATEGIES[name]
    return [weights, *([gradients] * nodes)]


def _train(
    net: nn.Module,
    text: Tensor,
    weights: Send,
    gradients: Sequence[Send],
    seed: int,
    args: argparse.Namespace,
) -> list[float]:
    kept = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(kept, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    nodes = [_batches(text, 1000 * seed + node, _BATCH) for node in range(args.nodes)]
    losses = []
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 20)
        own = [p.detach().clone() for p in kept]
        with torch.no_grad():
            for i, p in enumerate(kept):
                p.copy_(weights(i, p))
        total = [torch.zeros_like(p) for p in kept]
        for batches, send in zip(nodes, gradients, strict=True):
            ids = next(batches)
            loss = net(input_ids=ids, labels=ids).loss
            losses.append(loss.item())
            for i, grad in enumerate(torch.autograd.grad(loss, kept)):
                total[i] += send(i, grad) / args.nodes
        with torch.no_grad():
            for p, values, grad in zip(kept, own, total, strict=True):
                p.copy_(values)
                p.grad = grad
        nn.utils.clip_grad_norm_(kept, 1.0)
        optimizer.step()
    return losses


def _pretrained(args: argparse.Namespace, text: Tensor, seed: int) -> nn.Module:
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig  # noqa: PLC0415 - an extra

    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "use_cache": False}
    llama = LlamaConfig(
        hidden_size=_WIDTH,
        intermediate_size=8 * _WIDTH // 3,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        max_position_embeddings=_LENGTH,
        **sizes,
    )
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    gpt = GPT2Config(n_embd=_WIDTH, n_layer=_LAYERS, n_head=4, n_positions=_LENGTH, **none, **sizes)
    model = AutoModelForCausalLM.from_config(llama if args.model == "llama" else gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    batches = _batches(text, seed, 8)
    for step in range(args.pretraining):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 100) * (1 - step / (args.pretraining + 100))
        ids = next(batches)
        model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - an extra

    config = LoraConfig(r=8, target_modules="all-linear")
    return get_peft_model(model, config)


def _text(folder: Path, pattern: str) -> Tensor:
    """The bytes of all files of this kind."""
    data = b"".join(path.read_bytes() for path in sorted(folder.glob(pattern)))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def _batches(text: Tensor, seed: int, size: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - _LENGTH, (size,), generator=generator)
        yield torch.stack([text[start : start + _LENGTH] for start in starts.tolist()])


if __name__ == "__main__":
    main()
