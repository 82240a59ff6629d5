"""Whose mistake an exception is, and how a user's mistake reads.

Our validation raises ValueError or TypeError with the argument, its value and the fix; such an
error ends a run with one line. The same types raised inside a library, or by a slip of our own
(`int(None)`), are our fault. The two are told apart by the statement that raised: a `raise` written
in one of our packages.
"""

import difflib
import dis
from collections.abc import Iterable

OUR_PACKAGES = ("meshes", "layers", "paxlike", "experiments")

_RAISE = dis.opmap["RAISE_VARARGS"]


def is_users_mistake(error: BaseException) -> bool:
    """Whether an exception is one of our messages to the user, or a file that cannot be opened."""
    if isinstance(
        error, FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError
    ):
        return True
    last = error.__traceback__
    if last is None or not isinstance(error, ValueError | TypeError):
        return False
    while last.tb_next is not None:
        last = last.tb_next
    # The package, because the module that runs as a script is called __main__.
    package = (last.tb_frame.f_globals.get("__package__") or "").partition(".")[0]
    return package in OUR_PACKAGES and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


def one_line(error: BaseException) -> str:
    """The message of an exception on a single line."""
    return " ".join(str(error).split()) or type(error).__name__


def expected_name(what: str, name: str, known: Iterable[str]) -> str:
    """Say that a name is unknown, which one may be meant, and which there are.

    Args:
        what: what kind of name it is, as in "unknown mode".
        name: the name that was given.
        known: the names that exist.

    Returns:
        A message for a ValueError.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"unknown {what} {name!r}; {hint}expected one of {', '.join(names) or '(none exist)'}"


def foreign_character(text: str) -> str:
    """Name the first character that no number, flag or name contains, such as a pasted dash.

    Returns:
        "" if all are plain ASCII, else a remark to append to a message.
    """
    for position, character in enumerate(text):
        if not character.isascii():
            return (
                f"; note the non-ASCII character {character!r} (U+{ord(character):04X}) at "
                f"position {position + 1}: retype it on the keyboard"
            )
    return ""
