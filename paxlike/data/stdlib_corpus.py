"""The default corpus: the Python standard library of the running interpreter.

About 12 MB of real text that is on every machine, offline: all sources, with the language's
documentation (`pydoc_data/topics.py`) among them. Tests, installed packages and what differs from
build to build are left out, so that two machines with the same Python read the same corpus.
"""

import os
import sysconfig

_LEFT_OUT = frozenset(
    "test tests idle_test site-packages dist-packages __pycache__ _bundled lib2to3".split()
)


def stdlib_files() -> list[str]:
    """Lists the standard library's source files, sorted by path.

    Returns:
        Absolute paths.

    Raises:
        ValueError: the interpreter has no readable sources (a zipped or stripped library).
    """
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        files += [
            os.path.join(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not files:
        raise ValueError(
            f"data.source.kind is 'stdlib', and {root} holds no .py file; "
            "this Python carries no sources: give kind 'text' and paths"
        )
    return sorted(files, key=lambda path: os.path.relpath(path, root).split(os.sep))
