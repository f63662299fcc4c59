"""Find the machine for a command's predicted times by its name."""

from __future__ import annotations

from fcdp_compile.cluster.profile import find_profile
from fcdp_compile.errors import FcdpError, ProfileError
from fcdp_compile.plan.cost import MACHINES, Machine


def machine_named(name: str) -> Machine:
    """Return the speeds of a type of device, of a built-in cluster, or of a profile's file.

    Raises: ProfileError for a damaged file, FcdpError for an unknown name; OSError for a file that
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
