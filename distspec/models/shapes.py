"""Models without weights, for benchmarks: config.json says `"random_weights": SEED`, and they are drawn when loaded.

Knows that key, and the shapes that ship under the name `random:SHAPE`. Does not know how weights are drawn.
"""

from __future__ import annotations

from pathlib import Path

from distspec.errors import ConfigError, ModelNotFound
from distspec.models.config import FIELD, read_tree

PREFIX = "random:"
KEY = "random_weights"
_SHIPPED = Path(__file__).parent / "random"
"""Published shapes, but for experts: `deepseek-37b` is DeepSeek-V3 and `deepseek-2.6b` DeepSeek-V2-Lite with all layers
as their first ones are. The former has as many weights as the real one reads for a token."""


def shape_folder(name: str) -> Path:
    """The folder of `random:SHAPE`. Raises ModelNotFound with the shapes that ship."""
    shapes = sorted(path.name for path in _SHIPPED.iterdir())
    shape = name.removeprefix(PREFIX)
    if shape not in shapes:
        raise ModelNotFound(name, [f"shapes with random weights: {', '.join(shapes)}"])
    return _SHIPPED / shape


def weights_seed(folder: str | Path, field: str = FIELD) -> int | None:
    """What the weights of a folder are drawn from; None if it has files of them. field: as of ModelConfig.

    Raises ModelNotFound without a config.json, ConfigError for a seed that is no number.
    """
    seed = read_tree(folder, field).get(KEY)
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
        raise ConfigError(field, f"{folder}: {KEY} is {seed!r}, need a seed, 0 or more")
    return seed
