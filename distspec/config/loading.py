"""From a file, the environment and overrides to a checked configuration.

Knows sources and their order: a configuration is named (a file in `distspec/configs/`) or a path; environment variables
`DISTSPEC__POOLS__VERIFY__REPLICAS=2` come next, then overrides `pools.verify.replicas=2`. Unknown keys are refused with
the nearest valid name. Does not know what any key means.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Struct

from distspec.config.checks import check
from distspec.config.sections import Config
from distspec.errors import ConfigError, InvalidValue, UnknownKey

CONFIGS = Path(__file__).parent.parent / "configs"
ENV_PREFIX = "DISTSPEC__"
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML's own would drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                name = self.construct_object(key)  # 8 and 0x8 are one
                if name in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{name} is there twice", key.start_mark)
                seen.add(name)
        return super().construct_mapping(node, deep)


def load(source: str | Path | Mapping[str, Any] = "local", overrides: Iterable[str] = ()) -> Config:
    """A checked configuration.

    source: the name of a shipped configuration, a path, or the tree itself. overrides: `a.b.c=value`,
    value in YAML. Raises ConfigError (UnknownKey, InvalidValue) with the path of the key.
    """
    tree = dict(source) if isinstance(source, Mapping) else _read(source)
    for key, value in os.environ.items():
        if key.startswith(ENV_PREFIX):
            _set(tree, key[len(ENV_PREFIX) :].lower().split("__"), value)
    for override in overrides:
        key, sep, value = override.partition("=")
        if not sep:
            raise ConfigError(override, "an override reads key.path=value")
        _set(tree, key.strip().split("."), value)
    _refuse_unknown(Config, tree, "")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        path = path.removeprefix("`key` in ").strip("`$.").replace("[...]", "")
        if message.startswith("Invalid enum value"):
            message += f", need one of {', '.join(_choices(path))}"
        raise ConfigError(path or "(top)", message) from None
    check(config)
    return config


def named() -> list[str]:
    """Names of the configurations that ship with the package."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def _read(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    shipped = CONFIGS / f"{source}.yaml"
    if not os.path.isfile(path):  # unlike Path.is_file, also of a name that no file can have
        if not os.path.isfile(shipped):
            raise ConfigError("config", f"{source!s} is no file and no shipped configuration ({', '.join(named())})")
        path = shipped
    try:
        tree = _parsed(path.read_text())
    except OSError as error:
        raise ConfigError("config", f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError("config", f"{path}: not YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError("config", f"{path}: the top level must be a mapping")
    return tree


def _parsed(text: str) -> Any:
    """What YAML says. Raises ValueError, in one line."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def _set(tree: dict[str, Any], path: list[str], text: str) -> None:
    for i, key in enumerate(path[:-1]):
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(".".join(path[: i + 1]), "is a value, not a section")
        tree[key] = dict(child)
        tree = tree[key]
    try:
        tree[path[-1]] = _parsed(text)
    except ValueError:
        raise InvalidValue(".".join(path), text, "a YAML value") from None


def _refuse_unknown(kind: type, tree: Any, path: str) -> None:
    hints = get_type_hints(kind, include_extras=False)
    if not isinstance(tree, Mapping):
        raise InvalidValue(path or "(top)", tree, "a mapping")
    for key, value in tree.items():
        here = f"{path}.{key}" if path else str(key)
        if key not in hints:
            raise UnknownKey(here, _nearest(str(key), path))
        child = _struct_in(hints[key])
        if child is not None:
            _refuse_unknown(child, value, here)


def _struct_in(hint: Any) -> type[Struct] | None:
    for candidate in (hint, *get_args(hint)):
        if isinstance(candidate, type) and get_origin(candidate) is None and issubclass(candidate, Struct):
            return candidate
    return None


def _choices(path: str) -> list[str]:
    """What the value at a path may be, or an item of it, where that is one of some names."""
    kind: Any = Config
    for key in path.partition("[")[0].split("."):
        hint = get_type_hints(kind)[key]
        kind = _struct_in(hint)
    found, hints = list[str](), [hint]
    for hint in hints:  # grows meanwhile
        if get_origin(hint) is Literal:
            found += get_args(hint)
        else:
            hints += get_args(hint)
    return found


def _nearest(key: str, path: str) -> list[str]:
    """Valid key paths that look like `key`: first beside it, then anywhere."""
    paths = _paths(Config, "")
    beside = {p.rpartition(".")[2]: p for p in paths if p.rpartition(".")[0] == path}
    anywhere = {p.rpartition(".")[2]: p for p in paths}
    for names in (beside, anywhere):
        close = difflib.get_close_matches(key, names, n=2, cutoff=0.6)
        if close:
            return [names[name] for name in close]
    return []


def _paths(kind: type, path: str) -> list[str]:
    out = []
    for name, hint in get_type_hints(kind).items():
        here = f"{path}.{name}" if path else name
        out.append(here)
        child = _struct_in(hint)
        if child is not None:
            out += _paths(child, here)
    return out
