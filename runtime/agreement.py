"""What ranks agree on as a forward starts: that they run one plan, and flags that any may raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fcdp_compile import plan_json
from fcdp_compile.errors import PlanMismatchError
from fcdp_compile.runtime.collectives import Collectives

_FIRST_WORDS = 7
"""Words of flags in the first message."""

_FLAGS = 60
"""Flags in a word: int64, and no sign."""


def any_rank(
    collectives: Collectives, digest: str, flags: Sequence[bool], describe: Callable[[], str]
) -> list[bool]:
    """For each flag, whether any rank raised it; all ranks must ask, with as many flags.

    digest: of the plan about to run.  describe: gives the plan as JSON, for a disagreement.

    Raises: PlanMismatchError on every rank if ranks are about to run different plans.
    """
    # One message of a fixed size, whatever the plan: ranks with different plans must not meet in
    # collectives of different sizes.
    head = int(digest[:15], 16)
    words = [
        sum(f << i for i, f in enumerate(flags[w : w + _FLAGS]))
        for w in range(0, len(flags), _FLAGS)
    ]
    padded = words[:_FIRST_WORDS] + [0] * (_FIRST_WORDS - len(words))
    first = collectives.agree([head, *padded])
    if any(row[0] != head for row in first):
        raise PlanMismatchError(_mismatch(collectives.exchange_texts(describe())))
    rows = [row[1:] for row in first]
    if len(words) > _FIRST_WORDS:
        more = collectives.agree(words[_FIRST_WORDS:])
        rows = [a + b for a, b in zip(rows, more, strict=True)]
    return [any(row[i // _FLAGS] >> i % _FLAGS & 1 for row in rows) for i in range(len(flags))]


def _mismatch(texts: list[str]) -> str:
    plans = [plan_json.from_json(text, source=f"plan of rank {i}") for i, text in enumerate(texts)]
    other = next(i for i, plan in enumerate(plans) if plan.digest() != plans[0].digest())
    lines = "\n  ".join(plan_json.diff(plans[0], plans[other], names=("rank 0", f"rank {other}")))
    return (
        f"ranks 0 and {other} compiled different plans; make every rank run the "
        f"same model with the same settings:\n  {lines}"
    )
