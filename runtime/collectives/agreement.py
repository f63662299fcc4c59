"""What ranks agree on before they communicate: that they do the same, and flags that any may raise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fcdp_compile.errors import FcdpError, PlanMismatchError
from fcdp_compile.params.fingerprint import fingerprint
from fcdp_compile.plan import json as plan_json
from fcdp_compile.ranks.differences import first_other
from fcdp_compile.runtime.collectives.collectives import Collectives

_FIRST_WORDS = 30
"""Words of flags in a message: of more flags than any model has had yet, so that one is enough."""

FLAGS_OF_A_WORD = 60
"""Words are int64, and have no sign."""


_ON_PLANS = "the agreement on the plan and on what is stale"

SYNCHRONISES, ACCUMULATES = "synchronises", "accumulates"
"""What the backward of a forward will do with gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a rank is about to run: the digest of a plan, a mode, and what gives the plan as JSON."""

    digest: str
    mode: str
    describe: Callable[[], str]


def any_rank(collectives: Collectives, about: About, flags: Sequence[bool]) -> list[bool]:
    """For each flag, whether any rank raised it; all ranks must ask, with as many flags.

    Raises: PlanMismatchError on every rank if ranks are about to run different plans, or one in different
    modes.
    """
    question = Question(collectives, f"{about.digest} {about.mode}", flags, _ON_PLANS)
    if (found := question.answer()) is None:
        modes = collectives.exchange_texts(about.mode)
        raise PlanMismatchError(
            _mode_mismatch(modes) or _mismatch(collectives.exchange_texts(about.describe()))
        )
    return found


class Question:
    """Flags that any rank may raise, and what all ranks must be about to do.

    All ranks must ask, with as many flags, and the words are on their way until the answer is wanted.  Every
    message has one size, whatever is asked: ranks that are about to do different things must not meet in
    messages of different sizes.  Where every rank sends the same bits and the same complement, no bit is in
    both for all.

    act: what the rank is about to do, such as "gathers parameter 'head.weight'".  what: the question itself,
    for the error if a rank does not come.
    """

    def __init__(
        self, collectives: Collectives, act: str, flags: Sequence[bool], what: str
    ) -> None:
        self._collectives = collectives
        self._act = act
        self._count = len(flags)
        self._what = what
        first, *self._more = _in_messages(packed(flags))
        head = _head(act)
        self._telling = collectives.tell([head, ~head, *first], what)

    def answer(self) -> list[bool] | None:
        """For each flag, whether any rank raised it; None if ranks are about to do different things."""
        told, complement, *found = self._telling.finish()
        if told & complement:
            return None
        for message in self._more:
            found += self._collectives.tell(message, self._what).finish()
        return unpacked(found, self._count)

    def agreed(self) -> list[bool]:
        """For each flag, whether any rank raised it.

        Raises: PlanMismatchError on every rank if another one is about to do something else.
        """
        if (found := self.answer()) is None:
            raise PlanMismatchError(_mode_mismatch(self._collectives.exchange_texts(self._act)))
        return found


def _in_messages(words: list[int]) -> list[list[int]]:
    """Words of flags in messages of one size."""
    padded = words + [0] * (-len(words) % _FIRST_WORDS or _FIRST_WORDS * (not words))
    return [padded[at : at + _FIRST_WORDS] for at in range(0, len(padded), _FIRST_WORDS)]


def same_act(collectives: Collectives, act: str) -> None:
    """Make sure that every rank is about to do `act`, outside of compiled graphs.

    act: as in `Question`.

    Raises: PlanMismatchError on every rank if another one is about to do something else, or to run a graph.
    """
    Question(collectives, act, [], f"the agreement before a rank {act}").agreed()


def same_tensors(collectives: Collectives, act: str, tensors: Mapping[str, Tensor]) -> None:
    """Make sure that every rank is about to do `act` with the same tensors, which each has whole.

    act: as in `same_act`.  tensors: by name; those on meta are not compared.

    Raises: PlanMismatchError on every rank if one does something else or has tensors of other names,
    FcdpError on every rank if values differ.
    """
    names = sorted(tensors)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    same_act(collectives, f"{act}: {names[0]!r} and {len(names) - 1} more ({digest})")
    marks = [0 if (t := tensors[name]).is_meta else int(fingerprint([t])) for name in names]
    for name, *found in zip(
        names, *collectives.agree(marks, "the comparison of what is loaded"), strict=True
    ):
        if other := first_other(found):
            raise FcdpError(
                f"rank 0 {act}, and {name!r} has other values on rank {other}; give every rank the same "
                "values"
            )


def _head(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def packed(flags: Sequence[bool]) -> list[int]:
    """Flags as words that ranks can exchange."""
    return [
        sum(f << i for i, f in enumerate(flags[w : w + FLAGS_OF_A_WORD]))
        for w in range(0, len(flags), FLAGS_OF_A_WORD)
    ]


def unpacked(words: Sequence[int], count: int) -> list[bool]:
    """The first `count` flags of words."""
    size = FLAGS_OF_A_WORD
    return [bool(words[i // size] >> i % size & 1) for i in range(count)]


def _mode_mismatch(modes: list[str]) -> str:
    if (other := first_other(modes)) is None:
        return ""
    if not {SYNCHRONISES, ACCUMULATES}.issuperset(modes):
        mine, others = (
            "runs a compiled graph" if mode in (SYNCHRONISES, ACCUMULATES) else mode
            for mode in (modes[0], modes[other])
        )
        return (
            f"rank 0 {mine} and rank {other} {others}; let every rank do the same in the same order, "
            "whatever its rank and data: load and save on every rank, and let a loop over experts go "
            "over all experts, not only over those that got tokens"
        )
    return (
        f"rank 0 {modes[0]} the gradients of this forward and rank {other} {modes[other]} them; enter and "
        "leave fcdp_compile.no_sync for the same micro-batches on every rank"
    )


def _mismatch(texts: list[str]) -> str:
    plans = [plan_json.from_json(text, source=f"plan of rank {i}") for i, text in enumerate(texts)]
    other = first_other([plan.digest() for plan in plans])
    assert other is not None, "ranks that compiled one plan do not come here"
    lines = "\n  ".join(plan_json.diff(plans[0], plans[other], names=("rank 0", f"rank {other}")))
    return (
        f"ranks 0 and {other} compiled different plans; make every rank run the same model with the same "
        f"settings, and take the same branches whatever its data:\n  {lines}"
    )
