"""Calls of tools in the text of an answer, read while the text grows.

Knows how models spell calls. Does not know requests, constraints, tokens or streams.

What was given out is never taken back, and in which pieces the text came changes nothing. So a call is one as soon as
its name, that of a tool, and the beginning of its arguments are there; the arguments follow as the model spells them. A
call whose arguments come before its name is given out when it is whole. What does not become a call is content, but for
white space beside calls.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

_SPACE = " \t\r\n"
_HEAD = re.compile(
    r'\{[ \t\r\n]*"name"[ \t\r\n]*:[ \t\r\n]*(?P<name>"(?:[^"\\]|\\.)*")[ \t\r\n]*,'
    r'[ \t\r\n]*"(?:arguments|parameters)"[ \t\r\n]*:[ \t\r\n]*(?=\{)'
)
"""A call up to its arguments, as nearly all models spell it."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of call `index` of an answer. id and name come with the first; arguments: JSON, or some more of it."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """What a piece of text says. calls: at most one piece of each."""

    content: str = ""
    calls: tuple[CallPiece, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.calls)


@dataclass(frozen=True, slots=True)
class Style:
    """How calls are spelled: each is a JSON object of `name` and `arguments` or `parameters`, between begin and end.

    Without a begin, a call is only one where the answer begins or after another; between them are characters of
    `between`. gap, arguments: a model spells `<begin><gap>{"name": ..., "<arguments>": {...}}<gap><end>`.
    """

    begin: str = ""
    end: str = ""
    between: str = ""
    gap: str = ""
    arguments: str = "arguments"


HERMES = Style(begin="<tool_call>", end="</tool_call>", gap="\n")
"""Of Hermes 2 Pro and later, Qwen 2.5 and 3 and others."""
LLAMA3_JSON = Style(between=_SPACE + ";", arguments="parameters")
"""Of Llama 3.1 and later."""
LIST = Style(between=_SPACE + "[,]")
"""A JSON list of calls, as a constraint makes it."""


class Reader(Protocol):
    """What the text of one answer says."""

    def push(self, text: str, *, last: bool = False) -> Said:
        """What is certain by now and was not given out before. last: no text follows."""

    def reason(self, reason: str) -> str:
        """finish_reason as OpenAI has it: "tool_calls" in place of "stop" where the model chose to call."""


class Plain:
    """All text is content."""

    def push(self, text: str, *, last: bool = False) -> Said:
        return Said(text)

    def reason(self, reason: str) -> str:
        return reason


class Named:
    """All text is the arguments of one call, of the function that the request names."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str, *, last: bool = False) -> Said:
        if not text and not (last and self._name):
            return Said()
        name, self._name = self._name, None
        return Said(calls=(CallPiece(0, text, _id() if name else None, name),))

    def reason(self, reason: str) -> str:
        return reason


class Calls:
    """Content and calls. names: of the tools there are; most: calls that are told of, those after them are not.

    A machine whose states are its methods from `_content` on. Each takes from the text held what it can decide, and
    returns whether the next state may go on; if not, it needs more text.
    """

    def __init__(self, style: Style, names: Collection[str], most: int | None = None) -> None:
        self._style, self._names, self._most = style, names, most
        self._state: Callable[[], bool] = self._content if style.begin else self._between
        self._held = ""
        self._lead = ""  # what stood before the text held, and is content if that is no call
        self._scan, self._scanned = _Braces(), 0
        self._told = _Content()
        self._pieces: dict[int, CallPiece] = {}
        self._count = 0

    def push(self, text: str, *, last: bool = False) -> Said:
        self._held += text
        while self._state():
            pass
        if last:
            self._end()
        said = Said(self._told.take(last=last), tuple(self._pieces.values()))
        self._pieces = {}
        return said

    def reason(self, reason: str) -> str:
        return "tool_calls" if self._count and reason == "stop" else reason

    def _content(self) -> bool:
        """Content, up to the begin of a call; what may become one is held."""
        begin = self._style.begin
        at = self._held.find(begin)
        if at < 0:
            self._told.add(self._take(len(self._held) - _overlap(self._held, begin)))
            return False
        self._told.add(self._take(at))
        self._lead, self._state = self._take(len(begin)), self._object
        return True

    def _between(self) -> bool:
        """Where the next call may come without a begin; if something else does, the rest is content."""
        rest = self._held.lstrip(self._style.between)
        self._lead += self._take(len(self._held) - len(rest))
        if not rest:
            return False
        if rest.startswith("{"):
            self._state = self._object
            return True
        return self._no_call()

    def _rest(self) -> bool:
        """Content, to the end of the answer."""
        self._told.add(self._take(len(self._held)))
        return False

    def _object(self) -> bool:
        """A call up to its arguments or, where they come first, all of it."""
        self._lead += self._take(len(self._held) - len(self._held.lstrip(_SPACE)))
        if not self._held:
            return False
        if head := _HEAD.match(self._held):
            return self._call(_loads(head["name"]), "", head.end(), self._arguments)
        if not self._held.startswith("{"):
            return self._no_call()
        end = self._scan.end(self._held, self._scanned)
        self._scanned = len(self._held)
        return end is not None and self._call(*_parts(self._held[:end]), end, self._after)

    def _arguments(self) -> bool:
        end = self._scan.end(self._held)
        self._tell(self._take(len(self._held) if end is None else end))
        self._state = self._arguments if end is None else self._brace
        return end is not None

    def _brace(self) -> bool:
        """Where a call's object ends, which models forget at times."""
        self._held = self._held.lstrip(_SPACE)
        if not self._held:
            return False
        self._held = self._held.removeprefix("}")
        self._state = self._after
        return True

    def _after(self) -> bool:
        """Where the end of a call stands, which models forget at times."""
        end = self._style.end
        if end:
            self._held = self._held.lstrip(_SPACE)
            if self._held != end and end.startswith(self._held):
                return False
            self._held = self._held.removeprefix(end)
        self._state = self._content if self._style.begin else self._between
        return True

    def _call(self, name: object, arguments: str | None, end: int, then: Callable[[], bool]) -> bool:
        """The text held up to `end` begins a call, or is one, if it has arguments and there is such a tool."""
        if arguments is None or not isinstance(name, str) or name not in self._names:
            return self._no_call()
        self._take(end)
        self._lead, self._scan, self._scanned = "", _Braces(), 0
        self._told.interrupt()
        self._count += 1
        self._tell(arguments, name)
        self._state = then
        return True

    def _no_call(self) -> bool:
        self._told.add(self._lead)
        self._lead, self._scan, self._scanned = "", _Braces(), 0
        self._state = self._content if self._style.begin else self._rest
        return True

    def _tell(self, arguments: str, name: str | None = None) -> None:
        index = self._count - 1
        if self._most is not None and index >= self._most:
            return
        if name is not None:
            self._pieces[index] = CallPiece(index, arguments, _id(), name)
        elif arguments:
            piece = self._pieces.get(index, CallPiece(index, ""))
            self._pieces[index] = replace(piece, arguments=piece.arguments + arguments)

    def _end(self) -> None:
        """What is no call by now will be none; a call that was begun needs no end."""
        if self._state == self._between and self._count:
            return
        if self._state not in (self._arguments, self._brace, self._after):
            self._told.add(self._lead + self._take(len(self._held)))

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


class _Content:
    """Content, without the white space beside calls; but between two texts, that before a call stays."""

    def __init__(self) -> None:
        self._text = ""
        self._space = ""  # at the end of it
        self._has_text = self._has_calls = self._follows_call = False

    def add(self, text: str) -> None:
        if self._follows_call:
            text = text.lstrip(_SPACE)
            if not text:
                return
            self._space = self._space if self._has_text else ""
            self._follows_call = False
        text = self._space + text
        certain = text.rstrip(_SPACE)
        self._text, self._space = self._text + certain, text[len(certain) :]
        self._has_text = self._has_text or bool(certain)

    def interrupt(self) -> None:
        """A call begins here."""
        self._has_calls = self._follows_call = True

    def take(self, *, last: bool) -> str:
        """What is certain; with the white space at the end of an answer without calls, if this is the last."""
        taken = self._text + (self._space if last and not self._has_calls else "")
        self._text = ""
        return taken


class _Braces:
    """Finds where a JSON object ends. Nothing of it but braces and strings is looked at."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def end(self, text: str, start: int = 0) -> int | None:
        """Where in the text the object ends, None if it goes on. From start on, the text was not seen before."""
        for at in range(start, len(text)):
            char = text[at]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._in_string = char != '"'
                self._is_escaped = char == "\\"
            elif char == '"':
                self._in_string = True
            elif char == "{":
                self._depth += 1
            elif char == "}":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


def _parts(call: str) -> tuple[object, str | None]:
    """Name and arguments of a whole call; arguments are None if it is none."""
    found = _loads(call)
    if not isinstance(found, dict):
        return None, None
    arguments = found.get("arguments", found.get("parameters"))
    return found.get("name"), json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else None


def _id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _loads(text: str) -> object:
    """None where this is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, begin: str) -> int:
    """Length of the longest end of the text that is the beginning, not all, of `begin`."""
    return next(size for size in range(min(len(text), len(begin) - 1), -1, -1) if text.endswith(begin[:size]))
