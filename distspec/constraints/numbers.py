"""Numbers of a schema, between bounds and in steps, as xgrammar can hold them.

Knows the keywords of numbers, and where xgrammar's grammars allow more than these. Does not know other types.

Bounds become what holds to them in float64, as which most who read an answer have its numbers: far from 0 a decimal
that is not the bound may be read as if it were.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil, floor, inf, isfinite, nextafter
from typing import Any

from distspec.constraints.values import LEAST, MOST, is_a, is_spelled, refused

Schema = dict[str, Any]

_BOUNDS: dict[str, tuple[bool, Callable[[Fraction], int]]] = {
    "minimum": (True, ceil),
    "exclusiveMinimum": (True, lambda number: floor(number) + 1),
    "maximum": (False, floor),
    "exclusiveMaximum": (False, lambda number: ceil(number) - 1),
}
"""Whether it is the least, and which whole number is the nearest that is left."""
_DECIMALS = 6
_STEP = Fraction(1, 10**_DECIMALS)
_FINE = 2.0**33
"""Up to here, numbers a step apart are not the same in float64."""
_MOST_MULTIPLES = 1000
_LARGEST_MULTIPLE = 1024
"""Beyond it xgrammar passes over multipleOf."""


def exact_number(schema: Schema, at: str) -> Schema:
    """A schema of the type "number" or "integer", of keywords of these alone. Raises BadConstraint."""
    for name in _BOUNDS:
        if name in schema and not (is_a(schema[name], "number") and -inf < schema[name] < inf):
            raise refused(at, name, "need a number")
    if "multipleOf" in schema:
        return _multiples(schema, at)
    return _integer(schema, at) if schema["type"] == "integer" else _number(schema, at)


def _number(schema: Schema, at: str) -> Schema:
    """Between two bounds xgrammar writes so many decimals at most, and nothing at all where no such number is."""
    least, most = _multipliers(schema, _STEP)
    if least is not None and most is not None and least > most:
        raise refused(at, "minimum", f"no number of {_DECIMALS} decimals at most is left between the bounds")
    found: Schema = {"type": "number"}
    for name, (is_least, _) in _BOUNDS.items():
        if name in schema:
            kept, bound = _float64(name, schema[name], at)
            found[kept] = (max if is_least else min)(bound, found.get(kept, bound))
    return found


def _float64(name: str, bound: float, at: str) -> tuple[str, float]:
    """A bound that what is read as float64 keeps to, and its keyword."""
    is_least, _ = _BOUNDS[name]
    try:
        near = float(bound)
    except OverflowError:
        near = inf if bound > 0 else -inf
    passes = near < bound if is_least else near > bound
    if passes or (abs(near) > _FINE and name.startswith("exclusive")):
        name, near = ("minimum", nextafter(near, inf)) if is_least else ("maximum", nextafter(near, -inf))
    if not isfinite(near):
        raise refused(at, name, "need a number that a float can hold")
    return name, near


def _integer(schema: Schema, at: str) -> Schema:
    """For integers xgrammar takes whole bounds of 64 bits alone."""
    least, most = _multipliers(schema, Fraction(1))
    low, high = max(LEAST, LEAST if least is None else least), min(MOST, MOST if most is None else most)
    if low > high:
        name = next(name for name in _BOUNDS if name in schema)
        raise refused(at, name, "no integer of 64 bits is left within the bounds")
    ends = {} if least is None else {"minimum": low}
    return {"type": "integer", **ends, **({} if most is None else {"maximum": high})}


def _multiples(schema: Schema, at: str) -> Schema:
    """xgrammar holds integers to multipleOf, but no others, and not beside bounds."""
    of = schema["multipleOf"]
    if schema["type"] != "integer" or not is_a(of, "integer") or of <= 0:
        raise refused(at, "multipleOf", "only supported for integers, and as one above 0")
    least, most = _multipliers(schema, Fraction(int(of)))
    if least is None and most is None:
        if of > _LARGEST_MULTIPLE:
            raise refused(at, "multipleOf", f"above {_LARGEST_MULTIPLE} only supported between two bounds")
        return {"type": "integer", "multipleOf": int(of)}
    if least is None or most is None or not 0 <= most - least < _MOST_MULTIPLES:
        raise refused(at, "multipleOf", f"beside a bound, only where 1 to {_MOST_MULTIPLES} numbers are left")
    found = [times * int(of) for times in range(least, most + 1)]
    if not is_spelled(found):
        raise refused(at, "multipleOf", "only supported where all numbers that are left have 64 bits")
    return {"enum": found}


def _multipliers(schema: Schema, of: Fraction) -> tuple[int | None, int | None]:
    """The least and the largest number by which `of` can be multiplied within the bounds; None where there is none."""
    ends: dict[bool, list[int]] = {True: [], False: []}
    for name, (is_least, nearest) in _BOUNDS.items():
        if name in schema:
            # Decimals are what they are written as; whole floats, which may be large, what is read.
            written = int(schema[name]) if is_a(schema[name], "integer") else str(schema[name])
            ends[is_least].append(nearest(Fraction(written) / of))
    return max(ends[True], default=None), min(ends[False], default=None)
