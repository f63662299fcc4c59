"""Ranks agree before they communicate: that all do the same, and on flags that any rank may raise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fcdp_compile.core.params.seals import fingerprint
from fcdp_compile.core.ranks.messages import first_other
from fcdp_compile.errors import FcdpError, PlanMismatchError
from fcdp_compile.plan.diff import diff
from fcdp_compile.plan.json import from_json
from fcdp_compile.runtime.collectives.collectives import Collectives

_FIRST_WORDS = 30
"""Words of flags in a message: room for more flags than any model has had yet, so one is enough."""

FLAGS_OF_A_WORD = 60
"""Words are int64; words of flags are never negative."""


SYNCHRONISES, ACCUMULATES = "synchronises", "accumulates"
"""The modes of a forward: what its backward will do with gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a rank is about to run: a plan's digest, a mode, and a function that returns the plan as JSON.

    question: names the question whether all ranks run it, for the error if a rank does not answer.
    """

    digest: str
    mode: str
    describe: Callable[[], str]
    question: str = "the plan check"


def any_rank(collectives: Collectives, about: About, flags: Sequence[bool]) -> list[bool]:
    """For each flag, whether any rank raised it; all ranks must ask, with equally many flags.

    Raises: PlanMismatchError on every rank if ranks are about to run different plans, or one plan in
    different modes.
    """
    question = Question(collectives, f"{about.digest} {about.mode}", flags, about.question)
    if (found := question.answer()) is None:
        modes = collectives.exchange_texts(about.mode)
        raise PlanMismatchError(
            _mode_mismatch(modes) or _mismatch(collectives.exchange_texts(about.describe()))
        )
    return found


class Question:
    """Flags that any rank may raise, and an act that all ranks must be about to do.

    All ranks must ask, with equally many flags; the words travel until the answer is read.  The length of a
    message does not depend on the act: ranks that are about to do different things must not meet in messages
    of different sizes.  Each rank sends a hash of its act and the hash's complement; if all ranks send the
    same, the bitwise ors of both have no bit in common.

    act: what the rank is about to do, such as "gathers parameter 'head.weight'".  what: names the question,
    for the error if a rank does not join.
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

        Raises: PlanMismatchError on every rank if any rank is about to do something else.
        """
        if (found := self.answer()) is None:
            raise PlanMismatchError(_mode_mismatch(self._collectives.exchange_texts(self._act)))
        return found


def _in_messages(words: list[int]) -> list[list[int]]:
    """Words of flags, cut into messages of one size."""
    padded = words + [0] * (-len(words) % _FIRST_WORDS or _FIRST_WORDS * (not words))
    return [padded[at : at + _FIRST_WORDS] for at in range(0, len(padded), _FIRST_WORDS)]


def same_act(collectives: Collectives, act: str) -> None:
    """Make sure that every rank is about to do `act`, outside of compiled graphs.

    act: as in `Question`.

    Raises: PlanMismatchError on every rank if any rank is about to do something else, or to run a graph.
    """
    Question(collectives, act, [], f"the agreement before a rank {act}").agreed()


def same_tensors(collectives: Collectives, act: str, tensors: Mapping[str, Tensor]) -> None:
    """Make sure that every rank is about to do `act` with the same tensors; each rank has them whole.

    act: as in `same_act`.  tensors: by name; values on meta are not compared.

    Raises: PlanMismatchError on every rank if a rank does something else or has tensors of other names,
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
    plans = [from_json(text, source=f"plan of rank {i}") for i, text in enumerate(texts)]
    other = first_other([plan.digest() for plan in plans])
    assert other is not None, "ranks that compiled one plan do not come here"
    lines = "\n  ".join(diff(plans[0], plans[other], names=("rank 0", f"rank {other}")))
    return (
        f"ranks 0 and {other} compiled different plans; make every rank run the same model with the same "
        f"settings, and take the same branches whatever its data. The differences:\n  {lines}"
    )
