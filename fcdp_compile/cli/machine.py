"""The machine that a command predicts times for, by name."""

from __future__ import annotations

from fcdp_compile.cluster.profile import find_profile
from fcdp_compile.errors import FcdpError, ProfileError
from fcdp_compile.plan.cost import MACHINES, Machine


def machine_named(name: str) -> Machine:
    """The speeds of a type of device, of a built-in cluster, or those in a profile's file.

    Raises: ProfileError for a damaged file, FcdpError for a name that nothing has; OSError for a file that
    cannot be read.
    """
    if name in MACHINES:
        return MACHINES[name]
    try:
        return find_profile(name).rank_machine
    except ProfileError:
        raise
    except FcdpError as error:
        raise FcdpError(f"{error}; {', '.join(MACHINES)} are machines too") from None
