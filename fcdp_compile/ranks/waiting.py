"""Wait for blocking collectives; a lost rank, Ctrl-C or the end of the interpreter ends the wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Event

import torch.distributed as dist

from fcdp_compile.ranks.lost_ranks import close, lost_rank_error, world
from fcdp_compile.torch_compat import comes_from_peers

_LOOK = timedelta(seconds=0.25)
"""How often a blocked wait returns to Python, to run signal handlers and to check `exiting`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a rank waits for a collective, and when it stops waiting.

    doing: returns what the collective is for; called only if the collective fails.
    exiting: set when the interpreter ends; None on the main thread.
    """

    doing: Callable[[], str]
    exiting: Event | None = None

    @property
    def is_over(self) -> bool:
        """Whether the interpreter is ending."""
        return self.exiting is not None and self.exiting.is_set()


def finish(work: dist.Work, group: dist.ProcessGroup | None, wait: Wait) -> None:
    """Wait for a blocking collective.

    Raises: LostRankError if it fails because of other ranks; an error of this rank alone as it is.  If the
    interpreter ends or the wait is interrupted first, the group is closed: otherwise the process would wait
    for the collective when it exits.
    """
    try:
        while not work.is_completed():
            try:
                work.wait(_LOOK)
            except RuntimeError:
                # The collective took longer, failed, or was done just after: only `work` itself can tell.
                if wait.is_over:
                    raise
        work.wait()
    except RuntimeError as error:
        if not wait.is_over:
            if not comes_from_peers(error):
                raise
            raise lost_rank_error(group, wait.doing(), error) from error
        close(group or world())
        raise
    except BaseException as interrupt:
        close(group or world())
        raise interrupt from None  # without "during handling of" a wait that only timed out
