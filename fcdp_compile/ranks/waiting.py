"""Wait for collectives that block: a lost rank, Ctrl-C and the end of the interpreter end the wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Event

import torch.distributed as dist

from fcdp_compile.ranks.lost_ranks import close, lost_rank_error, world

_LOOK = timedelta(seconds=0.25)
"""How often a blocked collective lets Python run: signal handlers, and a look at `exiting`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a rank waits for a collective, and until when.

    doing: tells what the collective is for; called only if it fails.
    exiting: set when the interpreter ends; None on the main thread.
    """

    doing: Callable[[], str]
    exiting: Event | None = None

    @property
    def is_over(self) -> bool:
        """Whether the interpreter ends."""
        return self.exiting is not None and self.exiting.is_set()


def finish(work: dist.Work, group: dist.ProcessGroup | None, wait: Wait) -> None:
    """Wait for a collective that blocks.

    Raises: LostRankError if it fails.  If the wait is over before, or interrupted, the group is closed: else
    the process would wait for the collective at its end.
    """
    try:
        while not work.is_completed():
            try:
                work.wait(_LOOK)
            except RuntimeError:
                # Either it took longer, or failed, or was done right after: only the work itself can tell.
                if wait.is_over:
                    raise
        work.wait()
    except RuntimeError as error:
        if not wait.is_over:
            raise lost_rank_error(group, wait.doing(), error) from error
        close(group or world())
        raise
    except BaseException as interrupt:
        close(group or world())
        raise interrupt from None  # not "while handling" a look that was in vain
