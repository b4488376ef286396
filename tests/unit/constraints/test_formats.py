"""A string of a format is one to those who read it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import date, datetime, time
from ipaddress import IPv4Address
from itertools import product

import pytest

from distspec.constraints.formats import PATTERNS
from distspec.protocol.values import Constraint
from tests.spelling import walk

READERS: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "date-time": datetime.fromisoformat,
    "ipv4": IPv4Address,
}


def reads(kind: str, text: str) -> bool:
    try:
        READERS[kind](text)
    except ValueError:
        return False
    return True


def test_dates_are_the_days_there_are() -> None:
    years = (0, 1, 4, 10, 96, 100, 400, 999, 1000, 1900, 1999, 2000, 2023, 2024, 2100, 9999)
    for year, month, day in product(years, range(15), range(34)):
        text = f"{year:04}-{month:02}-{day:02}"
        assert bool(re.fullmatch(PATTERNS["date"], text)) == reads("date", text), text


def test_addresses_are_four_bytes() -> None:
    for number in (*range(300), "00", "01", "010", "1000", ""):
        for text in (f"{number}.2.3.4", f"1.2.3.{number}"):
            assert bool(re.fullmatch(PATTERNS["ipv4"], text)) == reads("ipv4", text), text


@pytest.mark.parametrize("kind", READERS)
def test_answers_can_be_read(kind: str) -> None:
    for seed in range(40):
        schema = json.dumps({"type": "string", "format": kind})
        READERS[kind](json.loads(walk(Constraint(kind="json_schema", text=schema), seed)))


@pytest.mark.parametrize("text", ["23:59:59Z", "00:00:00.123456+23:59", "09:10:11-00:30"])
def test_times_have_a_zone(text: str) -> None:
    assert re.fullmatch(PATTERNS["time"], text)
    assert re.fullmatch(PATTERNS["date-time"], f"2024-02-29T{text}")
    assert not re.fullmatch(PATTERNS["time"], text[:8])
