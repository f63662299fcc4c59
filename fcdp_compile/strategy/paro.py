"""Codes of PaRO (Wu et al., 2023), such as paro-iig."""

from __future__ import annotations

import re

PARO = re.compile(r"paro-([nig]{3})(?=\+|$)", re.IGNORECASE)
"""A name with one letter each for the scope of parameters, of gradients and of optimizer states."""


def why_no_paro(name: str, code: str) -> str:
    """Why a code of PaRO is not a preset."""
    parameters, gradients, states = ("nig".index(scope) for scope in code.lower())
    for what, scope in (("parameters", parameters), ("gradients", gradients)):
        if scope > states:
            return (
                f"strategy {name!r} shards {what} over more ranks than optimizer states, so a rank would "
                f"step values whose {what} it does not hold; PaRO's Principle 1 rules it out"
            )
    raise AssertionError(f"{name} is valid, but not a preset")
