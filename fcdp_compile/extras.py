"""Import libraries that an extra of the package brings, not the package itself."""

from __future__ import annotations

import importlib
from typing import Any

from fcdp_compile.errors import MissingExtraError

_EXTRA_OF = {
    "safetensors": "checkpoint",
    "tqdm": "checkpoint",
    "transformers": "hf",
    "peft": "hf",
    "accelerate": "hf",
    "trl": "trl",
    "lightning_fabric": "fabric",
    "matplotlib": "bench",
}
"""The smallest extra of pyproject.toml that brings each library."""


def require(library: str, what: str) -> Any:
    """Import and return a library, or a module of one.

    what: the feature that needs it, for the message.

    Raises: MissingExtraError, which names the extra to install.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        extra = _EXTRA_OF[library.partition(".")[0]]
        raise MissingExtraError(
            f"{what} needs {library}, which cannot be imported ({error}); pip install 'fcdp[{extra}]'"
        ) from None
