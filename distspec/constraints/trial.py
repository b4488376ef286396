"""Whether a constraint can be compiled, found out where it can do no harm: in a child process with limits.

Knows processes, pipes and limits of time and memory. Does not know requests, or what becomes of a constraint.

Some schemas and expressions take hours or all memory to compile, and nothing can stop a thread that does. Run as a
module, this is the child: it reads constraints, one a line, and answers each by what is wrong with it, or null. It has
loaded what compiling needs, and forks for each of them: one that is not done in time is killed without anything to load
again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from distspec.errors import BadConstraint, Overloaded, Unavailable
from distspec.protocol.values import Constraint

if TYPE_CHECKING:
    from distspec.constraints.grammar import Compiler

LIMIT_S = 5.0
START_S = 120.0
"""For a child to import what it needs, on a host that is busy."""
MEMORY_BYTES = 4 << 30
"""Address space of a child beyond what it starts with."""
CHILDREN = 4
MAX_WAITING = 64
"""Constraints that are tried or wait for it. More would wait for minutes, should none be done in time."""
KEPT = 1024
RETRY_S = 60.0
"""What took too long or too much memory is tried again after this, since that may have been for others beside it."""
TOO_LARGE = "compiling it takes too much memory"


class Trials:
    """folder: of the model's tokenizer; vocab_size, stop_ids: as in grammar.Compiler. limit_s: for each constraint.
    retry_s: see RETRY_S.

    Children start when there is something to try, at most CHILDREN at once, and take seconds to load what they need.
    Every method may be called from any thread.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        stop_ids: Iterable[int],
        *,
        limit_s: float = LIMIT_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._retry_s = retry_s
        self._arguments = [str(folder), str(vocab_size), json.dumps(list(stop_ids)), str(limit_s)]
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(CHILDREN, thread_name_prefix="trial")
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._known: OrderedDict[Constraint, _Verdict] = OrderedDict()
        self._waiting = 0

    def start(self) -> None:
        """The first child, ahead of time, so that nobody waits for what it loads."""
        child = self._spawned()
        with self._lock:
            self._idle.append(child)

    def submit(self, constraint: Constraint) -> Future[None]:
        """Done when it is known that the constraint can be compiled, at once if it was before. Its exception is
        BadConstraint for one that cannot, in time, or Unavailable where no child starts. Raises Overloaded."""
        with self._lock:
            if (known := self._verdict(constraint)) is not None:
                return _done(known.reason)
            if self._waiting >= MAX_WAITING:
                raise Overloaded(f"{self._waiting} constraints are waiting to be compiled", self._limit_s)
            self._waiting += 1
        future = self._threads.submit(self._try, constraint)
        future.add_done_callback(self._leave)
        return future

    def close(self) -> None:
        """End all children; what is being tried fails."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            children = list(self._all)
        for child in children:
            child.end()
        self._threads.shutdown()

    def _leave(self, _: Future[None]) -> None:
        with self._lock:
            self._waiting -= 1

    def _try(self, constraint: Constraint) -> None:
        with self._lock:
            known = self._verdict(constraint)
        if known is None:
            reason = self._ask(constraint)
            is_final = reason not in (TOO_LARGE, _too_slow(self._limit_s))
            known = _Verdict(reason, inf if is_final else time.monotonic() + self._retry_s)
            with self._lock:
                self._known[constraint] = known
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
        if known.reason is not None:
            raise BadConstraint(known.reason)

    def _verdict(self, constraint: Constraint) -> _Verdict | None:
        known = self._known.get(constraint)
        return known if known is not None and time.monotonic() < known.until_s else None

    def _ask(self, constraint: Constraint) -> str | None:
        child = self._take()
        try:
            return child.ask(constraint, self._limit_s)
        except TimeoutError:
            return _too_slow(self._limit_s)
        except EOFError:
            return TOO_LARGE
        finally:
            with self._lock:
                self._idle.append(child)

    def _take(self) -> _Child:
        """A child that nobody uses. Those that have ended are forgotten."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.is_alive():
                    return child
                child.end()
                self._all.discard(child)
        return self._spawned()

    def _spawned(self) -> _Child:
        child = _Child(self._arguments)
        with self._lock:
            self._all.add(child)
        return child


@dataclass(frozen=True, slots=True)
class _Verdict:
    """reason: what is wrong with a constraint, None for nothing. until_s: when it is no longer so (monotonic clock)."""

    reason: str | None
    until_s: float


class _Child:
    """Returned at once, it loads what it needs by itself."""

    def __init__(self, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distspec.constraints.trial", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            bufsize=0,
            start_new_session=True,  # a group of its own, to end what it has forked with it
        )
        self._is_ready = False

    def ask(self, constraint: Constraint, limit_s: float) -> str | None:
        """What is wrong with it, if anything. Raises TimeoutError or EOFError, or Unavailable for a child that does not
        start; it is over then."""
        self._wait_until_ready()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([constraint.kind, constraint.text]).encode() + b"\n")
        except OSError:
            self.end()
            raise EOFError from None
        # The child itself ends what takes too long; that it is late says that the host is busy.
        found: str | None = json.loads(self._read(limit_s + START_S))
        return found

    def _wait_until_ready(self) -> None:
        if self._is_ready:
            return
        try:
            self._read(START_S)
        except (TimeoutError, EOFError) as error:
            raise Unavailable(f"constraints cannot be compiled: {error or 'the compiler does not start'}") from None
        self._is_ready = True

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Once it is over, nothing happens."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self, limit_s: float) -> bytes:
        """A line of the child's."""
        assert self._process.stdout is not None
        line, end_s = b"", time.monotonic() + limit_s
        heard = select.poll()  # select itself takes no descriptor beyond 1023, and a server has one for each client
        heard.register(self._process.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            ready = heard.poll(1000 * max(0.0, end_s - time.monotonic()))
            part = self._process.stdout.read(1 << 16) if ready else None
            if not part:
                self.end()
                raise EOFError if ready else TimeoutError
            line += part
        return line


def _done(reason: str | None) -> Future[None]:
    future: Future[None] = Future()
    if reason is None:
        future.set_result(None)
    else:
        future.set_exception(BadConstraint(reason))
    return future


def _too_slow(limit_s: float) -> str:
    return f"not compiled within {limit_s:g} s"


def main() -> None:
    """The child. It ends with its input."""
    folder, vocab_size, stop_ids, limit_s = sys.argv[1:]
    os.nice(5)
    from distspec.constraints.grammar import Compiler
    from distspec.models.tokenizer import load_tokenizer_folder

    compiler = Compiler(load_tokenizer_folder(Path(folder)), int(vocab_size), json.loads(stop_ids))
    # Strings of JSON are most of the work of whatever holds some, and what only a fork knows is gone with it.
    compiler.compile(Constraint(kind="json_object"))
    if sys.platform == "linux":  # others do not say how large a process is
        size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
    print(flush=True)
    for line in sys.stdin:
        kind, text = json.loads(line)
        print(json.dumps(_forked(compiler, Constraint(kind=kind, text=text), float(limit_s))), flush=True)


def _forked(compiler: Compiler, constraint: Constraint, limit_s: float) -> str | None:
    """What is wrong with a constraint, found out by a fork of this process, which has no other thread."""
    context = multiprocessing.get_context("fork")
    answer, send = context.Pipe(duplex=False)
    fork = context.Process(target=_compile, args=(compiler, constraint, limit_s, send))
    fork.start()
    send.close()
    try:
        found: str | None = answer.recv() if answer.poll(limit_s) else _too_slow(limit_s)
    except EOFError:
        found = TOO_LARGE
    fork.kill()
    fork.join()
    answer.close()
    return found


def _compile(compiler: Compiler, constraint: Constraint, limit_s: float, send: Connection) -> None:
    """The fork. Should whoever started it be gone, the limit of processor time ends it."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(2 * limit_s) + 1, resource.RLIM_INFINITY))
    try:
        compiler.compile(constraint)
    except BadConstraint as error:
        send.send(str(error))
    else:
        send.send(None)


if __name__ == "__main__":
    main()
