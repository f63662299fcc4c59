"""Check the folder and the model that users pass to functions for checkpoints: they are easily swapped."""

from __future__ import annotations

import os

from torch import nn

from fcdp_compile.errors import ArgumentError


def refuse_swapped(folder: object, model: object, call: str) -> None:
    """Make sure that a folder is a path and a model a module.

    call: how the function is called, such as `save(folder, model)`.

    Raises: ArgumentError.
    """
    if isinstance(model, nn.Module) and isinstance(folder, str | os.PathLike):
        return
    found = f"{type(folder).__name__} as the folder and {type(model).__name__} as the model"
    if isinstance(folder, nn.Module) and isinstance(model, str | os.PathLike):
        found += ", which are swapped"
    raise ArgumentError(
        f"fcdp_compile.{call} was given {found}; a folder is a path, a model an nn.Module"
    )


def refuse_nameless(folder: str | os.PathLike[str]) -> None:
    """Make sure that a folder has a name: an empty one would mean the working directory.

    Raises: ArgumentError.
    """
    if not os.fspath(folder):
        raise ArgumentError(
            "the folder is an empty string; give a path, '.' for the working directory"
        )
