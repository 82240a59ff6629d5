"""Frozen dataclasses to plain JSON values and back, by their annotations.

A value that the annotation alone does not determine (a subclass, one of several dataclasses)
carries its class under `"type"`. A field that the file lacks takes its default, so that a file
outlives the addition of fields; one that the class lacks is an error, never dropped. Free of JAX.
"""

import dataclasses
import functools
import importlib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from paxlike.errors import OUR_PACKAGES, expected_name

_TYPE = "type"


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """Field name -> annotation of a dataclass, with string annotations resolved."""
    resolved = typing.get_type_hints(cls)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls)}


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Members of a union; the annotation itself otherwise."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def dataclass_of(annotation: Any) -> type | None:
    """The only dataclass among the alternatives of an annotation, if there is just one."""
    found = [
        kind
        for kind in alternatives(annotation)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    ]
    return found[0] if len(found) == 1 else None


def type_name(annotation: Any) -> str:
    """What an annotation accepts, in words for an error message."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if len(alternatives(annotation)) > 1:
        return " or ".join(type_name(kind) for kind in alternatives(annotation))
    if origin is tuple:
        if args[-1] is ...:
            return f"list of {type_name(args[0])}"
        return f"({', '.join(type_name(arg) for arg in args)})"
    if annotation in (None, types.NoneType):
        return "none"
    return {bool: "true or false", str: "text"}.get(annotation, "") or getattr(
        annotation, "__name__", str(annotation)
    )


def to_json(value: Any, annotation: Any = Any) -> Any:
    """Turn a value made of dataclasses, tuples, mappings and scalars into JSON values.

    Args:
        value: the value.
        annotation: what its place is declared as; a dataclass that this does not determine is
            written with its class.

    Raises:
        TypeError: a part of the value has no JSON form.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        fields = {name: to_json(getattr(value, name), kind) for name, kind in hints(cls).items()}
        if cls is dataclass_of(annotation):
            return fields
        return {_TYPE: f"{cls.__module__}:{cls.__qualname__}", **fields}
    if isinstance(value, tuple | list):
        kinds = _element_kinds(annotation, len(value))
        return [to_json(item, kind) for item, kind in zip(value, kinds, strict=True)]
    if isinstance(value, Mapping):
        kind = _value_kind(annotation)
        return {str(key): to_json(item, kind) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} has no JSON form; expected dataclasses, tuples and plain values")


def from_json(data: Any, annotation: Any, path: str = "") -> Any:
    """Rebuild a value from JSON values; the inverse of `to_json`.

    Args:
        data: what `json.loads` returned.
        annotation: what is expected.
        path: where the data stands, for error messages.

    Raises:
        ValueError: the data does not fit the annotation; the message names the path.
    """
    if annotation is Any:
        return data
    for kind in alternatives(annotation):
        if _fits(data, kind):
            return _convert(data, kind, path)
    raise ValueError(f"{path or 'value'} is {data!r}; expected {type_name(annotation)}")


def _fits(data: Any, kind: Any) -> bool:
    """Whether JSON data is of a kind, looking at its outermost level only."""
    origin = typing.get_origin(kind) or kind
    if origin is Literal:
        return any(data == arg and type(data) is type(arg) for arg in typing.get_args(kind))
    if origin in (None, types.NoneType):
        return data is None
    if origin is float:
        return isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data)
    if origin in (tuple, list):
        return isinstance(data, list)
    if not isinstance(origin, type):
        return False
    if issubclass(origin, Mapping):
        return isinstance(data, dict)
    if dataclasses.is_dataclass(origin):
        return isinstance(data, dict) and issubclass(_class_of(data, origin), origin)
    return type(data) is origin


def _convert(data: Any, kind: Any, path: str) -> Any:
    origin = typing.get_origin(kind) or kind
    if origin in (tuple, list):
        kinds = _element_kinds(kind, len(data))
        if len(kinds) != len(data):
            raise ValueError(f"{path} has {len(data)} elements; expected {type_name(kind)}")
        return tuple(
            from_json(item, element, f"{path}[{index}]")
            for index, (item, element) in enumerate(zip(data, kinds, strict=True))
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {
            key: from_json(item, _value_kind(kind), f"{path}.{key}") for key, item in data.items()
        }
    if isinstance(origin, type) and dataclasses.is_dataclass(origin):
        return _dataclass(data, _class_of(data, origin), path)
    return float(data) if origin is float else data


def _dataclass(data: dict[str, Any], cls: type, path: str) -> Any:
    known = hints(cls)
    given = {name: item for name, item in data.items() if name != _TYPE}
    for name in given:
        if name not in known:
            where = f" of {path}" if path else ""
            raise ValueError(expected_name(f"field{where}", name, known))
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.name not in given
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{path or cls.__name__} lacks {', '.join(missing)}")
    return cls(
        **{
            name: from_json(item, known[name], f"{path}.{name}" if path else name)
            for name, item in given.items()
        }
    )


def _class_of(data: dict[str, Any], default: type) -> type:
    """The class that data names, looked up in our packages only; else the default."""
    if _TYPE not in data:
        return default
    module, _, name = str(data[_TYPE]).partition(":")
    if module.partition(".")[0] not in OUR_PACKAGES:
        raise ValueError(
            f"type {data[_TYPE]!r} is not of our packages; expected <module>:<class> of "
            f"{', '.join(OUR_PACKAGES)}"
        )
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"type {data[_TYPE]!r} does not exist in this version") from error


def _element_kinds(annotation: Any, length: int) -> tuple[Any, ...]:
    """Annotation of each element of a sequence."""
    for kind in alternatives(annotation):
        if typing.get_origin(kind) in (tuple, list):
            args = typing.get_args(kind)
            repeated = typing.get_origin(kind) is list or args[-1] is ...
            return (args[0],) * length if repeated else args
    return (Any,) * length


def _value_kind(annotation: Any) -> Any:
    """Annotation of the values of a mapping."""
    for kind in alternatives(annotation):
        args = typing.get_args(kind)
        if len(args) == 2 and issubclass(typing.get_origin(kind) or object, Mapping):
            return args[1]
    return Any
