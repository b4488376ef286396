"""Formats of strings whose grammar in xgrammar holds what no reader of the format takes, as expressions that do not.

Knows RFC 3339 and dotted addresses. Does not know schemas or grammars. To JSON Schema a format is a remark; but most
who ask for one parse the answer, and there is no 31st of November. Seconds end with 59, and years begin with 1.
"""

from __future__ import annotations

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LONG = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = f"(?:{_YEAR}-(?:{_LONG}|{_SHORT}|{_FEBRUARY})|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+\-]{_HOUR}:[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
}
"""By format, of the whole string."""
