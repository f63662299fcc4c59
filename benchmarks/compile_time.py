"""How compile time grows with depth: seconds after Dynamo, by who spends them.

    python benchmarks/compile_time.py --layers 4 40 --compute inductor
    python benchmarks/compile_time.py --nodes 2 --ranks-per-node 1

Each depth runs in a process of its own with an empty Inductor cache (--warm: with the one that a first
run left).  With --cpu-time what is measured is processor time of the process and of the C++
compilers that it starts, one at a time, which other load on the machine does not change much.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

import fcdp_compile
from fcdp_compile import torch_compat
from fcdp_compile.backend import compilation
from fcdp_compile.backend.compute import Compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds after Dynamo.  The rest is AOTAutograd's: tracing, partitioning."""

    layers: int
    total_s: float
    passes_s: float
    inductor_s: float
    segments: int
    compiled: int
    cache_hits: int


def main() -> None:
    """Measure each depth and print a table; exit 1 if the deepest takes more than --limit of the first."""
    arguments = _arguments()
    if arguments.child:
        times = _measure(arguments)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(asdict(times)))
        return
    rows = [_in_a_process(arguments, layers) for layers in arguments.layers]
    unit = "CPU s" if arguments.cpu_time else "s"
    print(
        f"{'layers':>6} {'total ' + unit:>12} {'AOTAutograd':>12} {'fcdp passes':>12} "
        f"{'Inductor':>9} {'segments':>9} {'compiled':>9} {'cache hits':>10}"
    )
    for row in rows:
        rest = row.total_s - row.passes_s - row.inductor_s
        print(
            f"{row.layers:>6} {row.total_s:>12.1f} {rest:>12.1f} {row.passes_s:>12.1f} "
            f"{row.inductor_s:>9.1f} {row.segments:>9} {row.compiled:>9} {row.cache_hits:>10}"
        )
    ratio = rows[-1].total_s / rows[0].total_s
    print(f"{rows[-1].layers} layers / {rows[0].layers} layers: {ratio:.2f}")
    if arguments.limit and ratio > arguments.limit:
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile time by depth, after Dynamo.")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 40])
    parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--compute", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--strategy", default="fcdp")
    parser.add_argument("--bucket-mb", type=float, default=None)
    parser.add_argument("--warm", action="store_true", help="measure with Inductor's caches filled")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument(
        "--limit", type=float, default=None, help="largest ratio that is no failure"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_a_process(arguments: argparse.Namespace, layers: int) -> Times:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        if arguments.cpu_time:
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        options = [a for a in sys.argv[1:] if a != "--child"]
        command = [sys.executable]
        ranks = arguments.nodes * arguments.ranks_per_node
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, *options, "--child", "--layers", str(layers)]
        for _ in range(2 if arguments.warm else 1):
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return Times(**json.loads(done.stdout.splitlines()[-1]))


def _measure(arguments: argparse.Namespace) -> Times:
    now = _cpu_s if arguments.cpu_time else time.perf_counter
    total, inductor, planning, segment = (_Stopwatch(now) for _ in range(4))
    # Private places, patched here alone, so that nothing of this is in the package.
    for owner, name, watch in (
        (torch_compat, "compile_with_inductor", inductor),
        (compilation._Compilation, "_plan", planning),
        (compilation._Compilation, "_compile", total),
        (Compute, "compile", segment),
    ):
        setattr(owner, name, watch.around(getattr(owner, name)))

    mesh = fcdp_compile.make_mesh(nodes=arguments.nodes) if "RANK" in os.environ else None
    torch.manual_seed(0)
    model = fcdp_compile.shard(_model(arguments), mesh, strategy=arguments.strategy)
    options: dict[str, Any] = {"compute": arguments.compute}
    if arguments.bucket_mb is not None:
        options["bucket_mb"] = arguments.bucket_mb
    # A backward with symbols is compiled when it first runs: `_compile` counts then too.
    compiled = torch.compile(
        model, backend=total.around(compilation.fcdp), fullgraph=True, options=options
    )
    ids = torch.zeros(2, 32, dtype=torch.int64)
    compiled(input_ids=ids).logits.float().mean().backward()
    if mesh is not None:
        torch.distributed.destroy_process_group()
    return Times(
        layers=arguments.layers[-1],
        total_s=total.total_s,
        passes_s=planning.total_s,
        inductor_s=inductor.total_s,
        segments=segment.calls,
        compiled=inductor.calls,
        cache_hits=torch_compat.fx_graph_cache_hits(),
    )


def _model(arguments: argparse.Namespace) -> Any:
    transformers.logging.set_verbosity_error()
    if arguments.model == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=arguments.layers[-1],
                n_embd=arguments.width,
                n_head=4,
                vocab_size=1000,
                n_positions=64,
                resid_pdrop=arguments.dropout,
                embd_pdrop=arguments.dropout,
                attn_pdrop=arguments.dropout,
                use_cache=False,
            )
        )
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=arguments.layers[-1],
            hidden_size=arguments.width,
            intermediate_size=2 * arguments.width,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=1000,
            use_cache=False,
        )
    )


class _Stopwatch:
    """Adds up the time within functions, once where they call each other."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._depth = 0
        self.total_s = 0.0
        self.calls = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self._depth += 1
            start = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.total_s += self._now() - start

        return timed


def _cpu_s() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(s.ru_utime + s.ru_stime for s in spent)


if __name__ == "__main__":
    main()
