"""`path=value` overrides of an experiment, typed by the annotations of its fields.

All overrides are gathered into one tree and applied from the leaves up, each dataclass rebuilt
once: its validation sees all new values together, so that two overrides which are valid only
jointly work in any order. A path may lead into a dataclass that is None so far
(`model.moe.num_experts=8`), which is then built; into the rule table
(`parallel.rules.act_seq=seq,tensor`), which is then the named preset with these rows changed; and
into any table of named rows (`parallel.compiler_options.NAME=value`). Free of JAX.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from meshes.presets import preset
from meshes.rules import Rules
from paxlike.config import Experiment
from paxlike.errors import expected_name, foreign_character
from paxlike.serialization import alternatives, dataclass_of, hints, type_name


@dataclasses.dataclass
class _Node:
    """Overrides at one path: a value of its own, those below it, or both (rule tables)."""

    text: str | None = None
    below: dict[str, "_Node"] = dataclasses.field(default_factory=dict)


def apply(experiment: Experiment, overrides: Iterable[str]) -> Experiment:
    """Return the experiment with overrides applied jointly.

    Args:
        experiment: what is changed.
        overrides: texts `path=value`, such as `model.num_layers=2`. A value is written as its
            field's type says: numbers, true or false, text, none, one of the listed names, or
            elements separated by commas.

    Raises:
        ValueError: unknown path (the message lists near matches and the valid names), a value that
            does not parse, the same path twice, or an experiment that fails validation.
    """
    root = _Node()
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        if not equals or not path:
            raise ValueError(
                f"override {override!r} is not of the form path=value, such as "
                f"model.num_layers=2{foreign_character(override)}"
            )
        node = root
        for name in path.split("."):
            node = node.below.setdefault(name, _Node())
        if node.text is not None:
            raise ValueError(
                f"override {path} is given twice, as {node.text!r} and {text!r}; keep one"
            )
        node.text = text.strip()
    return _rebuild(experiment, Experiment, root, "") if root.below else experiment


def parse(text: str, annotation: Any, path: str) -> Any:
    """Parse a value by an annotation.

    Args:
        text: as written on the command line.
        annotation: scalar type, Literal, tuple, or a union of these.
        path: what the value is for, in the error message.

    Raises:
        ValueError: the text is none of what the annotation accepts.
    """
    # "none" is none before it is text, and text, which accepts everything, comes last.
    order = {types.NoneType: -1, str: 1}
    for kind in sorted(alternatives(annotation), key=lambda kind: order.get(kind, 0)):
        try:
            return _parse_one(text, kind, path)
        except ValueError:
            continue
    raise ValueError(
        f"override {path}={text}: expected {type_name(annotation)}{foreign_character(text)}"
    )


def _parse_one(text: str, kind: Any, path: str) -> Any:
    """Parse by one alternative of an annotation, or raise a ValueError without a message."""
    origin = typing.get_origin(kind)
    if kind is str:
        return text
    if kind in (None, types.NoneType) and text.lower() in ("none", "null"):
        return None
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind is int and text.isascii():
        return int(text)
    if kind is float and text.isascii() and math.isfinite(float(text)):
        return float(text)
    if origin is Literal:
        for arg in typing.get_args(kind):
            if text == str(arg):
                return arg
    if origin is tuple:
        return _parse_tuple(text, typing.get_args(kind), path)
    raise ValueError


def _parse_tuple(text: str, args: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    """Elements separated by commas; a pair inside a list is written name=value."""
    repeated = args[-1] is ...
    if not repeated and len(args) == 2 and "=" in text:
        items = text.split("=", 1)
    else:
        items = [item.strip() for item in text.strip("()[] ").split(",") if item.strip()]
    if not repeated and len(items) != len(args):
        raise ValueError
    kinds = (args[0],) * len(items) if repeated else args
    return tuple(parse(item, kind, path) for item, kind in zip(items, kinds, strict=True))


def _rebuild(value: Any, annotation: Any, node: _Node, path: str) -> Any:
    """New value at a path, given the old one and the overrides at and below the path."""
    kinds = alternatives(annotation)
    cls = _class_at(value, annotation)
    if not node.below and kinds == (cls,):
        raise ValueError(
            f"override {path}={node.text}: {path} has fields, set one of them: "
            f"{', '.join(hints(cls))}"
        )
    if node.text is not None:
        value = parse(node.text, annotation, path)
    if not node.below:
        return value
    if Rules in kinds:
        return _rebuild_rules(preset(value) if isinstance(value, str) else value, node, path)
    below = next(iter(node.below))
    if node.text is not None:
        raise ValueError(f"override {path}={node.text} contradicts {path}.{below}; keep one")
    if cls is not None:
        return _rebuild_dataclass(value, cls, node, path)
    kind = _row_kind(annotation)
    if kind is not None:
        rows = {name: _leaf(kind, row, f"{path}.{name}") for name, row in node.below.items()}
        return tuple((dict(value) | rows).items())
    raise ValueError(
        f"override {path}.{below}: {path} is {type_name(annotation)} and has no fields; set "
        f"{path}=..."
    )


def _class_at(value: Any, annotation: Any) -> type | None:
    """The dataclass of a value, or the one that its place is declared to hold."""
    return type(value) if dataclasses.is_dataclass(value) else dataclass_of(annotation)


def _rebuild_dataclass(value: Any, cls: type, node: _Node, path: str) -> Any:
    """Replace the fields of a dataclass, or build one where there was None."""
    known = hints(cls)
    changes = {}
    for name, below in node.below.items():
        where = f"{path}.{name}" if path else name
        if name not in known:
            owner = f"{path} " if path else ""
            raise ValueError(
                f"override {where}: {expected_name(f'{owner}field', name, known)}"
                f"{foreign_character(name)}"
            )
        changes[name] = _rebuild(getattr(value, name, None), known[name], below, where)
    if value is not None:
        return dataclasses.replace(value, **changes)
    missing = [
        f"{path}.{field.name}"
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in changes
    ]
    if missing:
        raise ValueError(
            f"{path} is None in this experiment; to build it from {path}.{next(iter(changes))}, "
            f"also set {', '.join(missing)}"
        )
    return cls(**changes)


def _rebuild_rules(rules: Rules, node: _Node, path: str) -> Rules:
    """The rule table with some rows changed."""
    known = dict(rules.table)
    for name in node.below:
        if name not in known:
            raise ValueError(
                f"override {path}.{name}: {expected_name('logical name', name, known)}"
            )
    return rules.replace(
        **{
            name: _leaf(tuple[str, ...] | None, below, f"{path}.{name}")
            for name, below in node.below.items()
        }
    )


def _leaf(annotation: Any, node: _Node, path: str) -> Any:
    """Value of a row of a table, below which there is nothing more."""
    if node.below:
        raise ValueError(f"override {path}.{next(iter(node.below))}: {path} has no fields")
    return parse(node.text or "", annotation, path)


def _row_kind(annotation: Any) -> Any:
    """X of tuple[tuple[str, X], ...], a table of named rows; None for other annotations."""
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple and len(args) == 2 and args[1] is ...:
        row = typing.get_args(args[0])
        if typing.get_origin(args[0]) is tuple and len(row) == 2 and row[0] is str:
            return row[1]
    return None
