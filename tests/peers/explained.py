"""Why a case is not equal: what the suite assumes, or what fcdp does not do.  The first match counts."""

from __future__ import annotations

import re

_REASONS: tuple[tuple[str, str], ...] = (
    (
        r"exchange|in a parameter's place",
        "[a limit](limits.md#not-there): no tensor takes the place of a sharded parameter",
    ),
    (
        r"aten\.(_sparse_coo|index|scatter|bmm|mm|sub_|add_|mul)",
        "the uncompiled adapter computes with its parameters outside of the forward of a module that has them",
    ),
    (r"is required for|No module named", "the suite needs a package that was not installed"),
    (r"the table has no", "the suite itself leaves it out"),
    (r"has no parameters", "there is nothing to shard"),
)


def reason(text: str) -> str:
    """The explanation of an outcome, or a text that says that there is none."""
    return next(
        (why for pattern, why in _REASONS if re.search(pattern, text)), "**not explained yet**"
    )
