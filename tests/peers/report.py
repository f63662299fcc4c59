"""Write docs/peers.md from the outcomes."""

from __future__ import annotations

import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from tabulate import tabulate

from tests.peers.explained import reason
from tests.peers.outcomes import Outcome, Status

_HEAD = """\
# Other projects' tests

<!-- Written by `make peers` from peers/outcomes.json. -->

`make peers` runs test suites of other projects on 2 x 2 ranks with Gloo, sharded with strategy `fcdp`, and
compares with the model that is not sharded, in the same process. `make peers PEERS_ARGS="--suite modules"`
runs one suite, `--again` also runs the cases that were equal. Nothing of these projects is in this
repository: pip downloads sources that are in no wheel, in the installed version.

* **operators**: torch's own table of operators (`torch.testing._internal.common_methods_invocations`), with
  values and gradients, on tensors that are all home shards. At most 10 inputs of each operator.
* **modules**: torch's own table of modules (`torch.testing._internal.common_modules`), in train and eval
  mode, float32 and float64, compiled and not. At most 4 inputs of each module.
* **peft**: the table of `tests/test_custom_models.py`: three steps in which only adapters change, then
  disabled, merged within [`gathered`](api.md), unmerged and unloaded.
* **fsdp**: PyTorch's own tests of FSDP2, `test_fully_shard_*.py` in `test/distributed/_composable/fsdp/`, for
  frozen, clip_grad_norm_, state_dict, grad_scaler, ignore_params and training, with `shard` in place of
  `fully_shard`; FSDP2's options become [those of fcdp](coming-from.md#fsdp2). No package has these files:
  `PEERS_ARGS="--torch-tests FOLDER"` names a folder with them; without it the suite is left out. A case tries
  all combinations of options that fcdp has and compares whole values with DDP's. Lines that count FSDP2's
  collectives or name its mesh are left out.
* **accelerate**: the functions of `test_sync.py` and `test_distributed_data_loop.py`, with fcdp's
  Accelerator, on 2 x 1 ranks, which the second script asks for.
* **transformers**: the functions of `tests/test_fsdp_mixin.py`, which compare FSDP2 and HSDP with DDP or with
  one process: saving and loading, also by torch's distributed checkpoints; 20 steps that resume from a
  checkpoint after 10; accumulation. HSDP is strategy `mics`.

*Refused* means that fcdp raised an error of one sentence on every rank.
"""


def write_report(
    page: Path, outcomes: Mapping[str, Mapping[str, Outcome]], suites: Mapping[str, str]
) -> None:
    """Write the page: a row a suite, then the cases that were not equal, by what was said."""
    rows = []
    for suite, cases in outcomes.items():
        count = Counter(one.status for one in cases.values())
        run = len(cases) - count[Status.SKIPPED]
        module = importlib.import_module(suites[suite])
        left = len(set(module.cases()) - set(cases))
        rows.append([suite, module.version(), run, *(count[s] for s in Status), left])
    heads = ["suite", "version", "run", *Status, "not run yet"]
    parts = [_HEAD, tabulate(rows, heads, tablefmt="pipe"), *map(_section, outcomes.items())]
    page.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")


def _section(item: tuple[str, Mapping[str, Outcome]]) -> str:
    suite, cases = item
    groups: dict[tuple[Status, str], list[str]] = defaultdict(list)
    for case, one in cases.items():
        if one.status is not Status.EQUAL:
            groups[one.status, _without_values(one.text)].append(case)
    if not groups:
        return ""
    order = list(Status)
    rows = [
        [status, len(found), _shown(found), _cell(text), reason(found[0], cases[found[0]].text)]
        for (status, text), found in sorted(
            groups.items(), key=lambda g: (-order.index(g[0][0]), -len(g[1]))
        )
    ]
    heads = ["outcome", "cases", "such as", "what was said", "why"]
    return f"\n## {suite}: not equal\n\n{tabulate(rows, heads, tablefmt='pipe')}\n"


def _without_values(text: str) -> str:
    """Drop names and numbers, so that equal sentences about different tensors are one row."""
    text = re.sub(r"base_model[\w.]*", "…", text)
    return re.sub(r"\(?\d[\d., e+-]*\)?", "… ", text)[:160].strip()


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ").replace("[", "(").replace("]", ")")


def _shown(cases: list[str]) -> str:
    return cases[0].replace("|", "/")
