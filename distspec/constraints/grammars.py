"""The grammars that are in use or were lately, each compiled once, on threads of their own.

Knows constraints and one vocabulary. Does not know requests, slots, or who waits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from distspec.constraints.grammar import Compiler
from distspec.protocol.values import Constraint

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

KEPT = 256
KEPT_BYTES = 1 << 30
"""Of all that are kept: of a large vocabulary a grammar of many states takes hundreds of megabytes."""
_THREADS = 2
"""So that one schema that takes seconds does not hold up the next."""


class Grammars:
    """load: makes the compiler, when it is first needed (seconds). wake: called on one of the threads whenever a
    grammar is ready, or turned out to be none. executor: in place of those threads."""

    def __init__(
        self,
        load: Callable[[], Compiler],
        wake: Callable[[], None] = lambda: None,
        executor: Executor | None = None,
    ) -> None:
        self._load, self._wake = load, wake
        self._executor = executor or ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._found: OrderedDict[Constraint, Future[CompiledGrammar]] = OrderedDict()
        self._loading = threading.Lock()
        self._compiler: Compiler | None = None

    def find(self, constraint: Constraint) -> Future[CompiledGrammar]:
        """The grammar of a constraint, now or later; its exception is BadConstraint. To be called from one thread."""
        found = self._found.pop(constraint, None)
        if found is None:
            while self._found and (len(self._found) >= KEPT or self._bytes() > KEPT_BYTES):
                self._found.popitem(last=False)
            found = self._executor.submit(self._compile, constraint)
            found.add_done_callback(lambda _: self._wake())
        self._found[constraint] = found
        return found

    def _bytes(self) -> int:
        """Of the grammars that are ready."""
        ready = (found for found in self._found.values() if found.done() and found.exception() is None)
        return sum(found.result().memory_size_bytes for found in ready)

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        with self._loading:
            if self._compiler is None:
                self._compiler = self._load()
            compiler = self._compiler
        return compiler.compile(constraint)
