"""Packages that only some sources and tokenizers need."""

import importlib
from typing import Any


def optional_package(name: str, *, needed_by: str) -> Any:
    """Imports a package, or says which setting needs it and how it is installed.

    Args:
        name: of the package, and of its distribution.
        needed_by: the setting, as the user wrote it.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{needed_by} needs the package {name}, which is not installed; run: pip install {name}"
        ) from error
