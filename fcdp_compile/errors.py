"""All error classes of fcdp, so that a caller can catch them without knowing the code that raises them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FcdpError(RuntimeError):
    """The base class of the errors that fcdp raises."""


class LostRankError(FcdpError):
    """A collective failed because other ranks did not join; the message names the collective and ranks."""


class StaleParameterError(FcdpError):
    """A backward needs parameter values that have changed, or whose copy is gone, since its forward."""


class PlanMismatchError(FcdpError):
    """Ranks compiled different plans, or are about to do different things; the message says which."""


class PlanFormatError(FcdpError, ValueError):
    """A file is not a plan, or is damaged; the message names the file and the field."""


class UnshardedParameterError(FcdpError):
    """A compiled graph, a sharded model or `full` got a parameter that `shard` has not sharded."""


class MixedTensorsError(FcdpError, ValueError):
    """An op got sharded and plain tensors; fcdp cannot know which rows the plain tensors hold."""


class UnsynchronizedGradientError(FcdpError):
    """An optimizer step lacks gradients of micro-batches that no synchronising backward has reduced."""


class ArgumentError(FcdpError, ValueError, TypeError):
    """A function was called with a wrong argument; the message says which arguments it takes."""


class MissingExtraError(FcdpError, ImportError):
    """A library of an extra cannot be imported; the message names the extra."""


class ProfileError(FcdpError, ValueError):
    """A file is not a cluster profile, or is damaged; the message names the file and the field."""


class RecordingError(FcdpError, ValueError):
    """A file holds no recording, a damaged recording, or one of another plan; the message says which."""


class CheckpointError(FcdpError, ValueError):
    """A checkpoint is damaged, incomplete or of another model; the message names files and tensors."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: `; did you mean 'fcdp'?`, or nothing if none is near.

    Names that share most letters are near; the guess is the near name with the fewest typing mistakes.
    """
    near = difflib.get_close_matches(name, list(known), n=5)
    if not near:
        return ""
    return f"; did you mean {min(near, key=lambda other: _mistakes(name, other))!r}?"


def _mistakes(a: str, b: str) -> int:
    """Letters that were left out, added, mistaken for others, or swapped with their neighbour.

    Source: the optimal string alignment distance.
    """
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and (x, y) == (b[j - 2], a[i - 2]):
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]
