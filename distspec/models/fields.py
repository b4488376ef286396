"""JSON objects that others wrote, and their fields, each held to its kind.

Knows JSON's types and how to say what is wrong. Does not know what a field means.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distspec.errors import ConfigError


def read_object(path: Path, field: str) -> dict[str, Any]:
    """The object in a JSON file. field: as of Fields. Raises ConfigError for anything else in it."""
    try:
        tree = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(field, f"{path}: not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(field, f"{path}: the top level must be an object")
    return tree


@dataclass(frozen=True, slots=True)
class Fields:
    """where: the object was found; field: what names it in the configuration. A field that is null is not there.

    All methods raise ConfigError that names the field: if it is of another kind, or is not there and has no default.
    """

    tree: Mapping[str, Any]
    where: str
    field: str

    def count(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        """An integer from `least` to `most`, by default as many as 32 bits hold."""
        value = self._value(name, default)
        if not _is_integer(value) or not least <= value <= most:
            raise self._wrong(name, value, f"an integer, {least} {f'to {most}' if most < 2**31 - 1 else 'or more'}")
        return int(value)

    def integers(self, name: str, default: Sequence[int] | None = None) -> tuple[int, ...]:
        """A list of integers."""
        value = self._value(name, default)
        if not isinstance(value, list | tuple) or not all(map(_is_integer, value)):
            raise self._wrong(name, value, "a list of integers")
        return tuple(value)

    def number(self, name: str, default: float | None = None, *, may_be_zero: bool = False) -> float:
        """Finite, and above zero unless it may be that."""
        value = self._value(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= sys.float_info.max or (value == 0 and not may_be_zero):
            raise self._wrong(name, value, f"a number, {'0 or more' if may_be_zero else 'above 0'}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def ids(self, name: str) -> frozenset[int]:
        """Token ids: one, a list, or none."""
        value = self._value(name, [])
        found = value if isinstance(value, list) else [value]
        if not all(_is_integer(id) and id >= 0 for id in found):
            raise self._wrong(name, value, "a token id or a list of them")
        return frozenset(found)

    def part(self, name: str) -> Fields:
        """An object; an empty one by default."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return Fields(value, f"{self.where}: {name}", self.field)

    def _value(self, name: str, default: Any) -> Any:
        value = self.tree.get(name)
        if value is None and default is None:
            raise ConfigError(self.field, f"{self.where}: key {name!r} is missing")
        return default if value is None else value

    def _wrong(self, name: str, value: object, need: str) -> ConfigError:
        return ConfigError(self.field, f"{self.where}: {name} is {str(value)[:80]!r}, need {need}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
