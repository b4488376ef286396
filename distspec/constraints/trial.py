"""Whether a constraint can be compiled, found out where it can do no harm: in a child process with limits.

Knows processes, pipes and limits of time and memory. Does not know requests, or what becomes of a constraint.

Some schemas and expressions take hours or all memory to compile, and nothing can stop a thread that does. A child that
is not done in time is killed, and the next one takes its place. Run as a module, this is the child: it reads
constraints, one a line, and answers each by what is wrong with it, or null.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from distspec.errors import BadConstraint, Unavailable
from distspec.protocol.values import Constraint

LIMIT_S = 5.0
START_S = 120.0
"""For a child to import what it needs, on a host that is busy."""
MEMORY_BYTES = 4 << 30
"""Address space of a child beyond what it starts with."""
CHILDREN = 4
KEPT = 1024


class Trials:
    """folder: of the model's tokenizer; vocab_size, stop_ids: as in grammar.Compiler. limit_s: for each constraint.

    Children start when there is something to try, at most CHILDREN at once. Every method may be called from any thread.
    """

    def __init__(self, folder: Path, vocab_size: int, stop_ids: Iterable[int], *, limit_s: float = LIMIT_S) -> None:
        self._arguments = [str(folder), str(vocab_size), json.dumps(list(stop_ids)), str(limit_s)]
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(CHILDREN, thread_name_prefix="trial")
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._known: OrderedDict[Constraint, str | None] = OrderedDict()

    def submit(self, constraint: Constraint) -> Future[None]:
        """Done when it is known that the constraint can be compiled. Its exception is BadConstraint for one that
        cannot, in time, or Unavailable where no child starts."""
        return self._threads.submit(self._try, constraint)

    def close(self) -> None:
        """End all children; what is being tried fails."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            children = list(self._all)
        for child in children:
            child.end()
        self._threads.shutdown()

    def _try(self, constraint: Constraint) -> None:
        with self._lock:
            is_known = constraint in self._known
            reason = self._known.get(constraint)
        if not is_known:
            reason = self._ask(constraint)
            with self._lock:
                self._known[constraint] = reason
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
        if reason is not None:
            raise BadConstraint(reason)

    def _ask(self, constraint: Constraint) -> str | None:
        child = self._take()
        try:
            return child.ask(constraint, self._limit_s)
        except TimeoutError:
            return f"not compiled within {self._limit_s:g} s"
        except EOFError:
            return "compiling it takes too much memory"
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
        child = _Child(self._arguments)
        with self._lock:
            self._all.add(child)
        return child


class _Child:
    def __init__(self, arguments: list[str]) -> None:
        """Returns when the child is ready. Raises Unavailable."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distspec.constraints.trial", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            bufsize=0,
        )
        try:
            self._read(START_S)
        except (TimeoutError, EOFError) as error:
            raise Unavailable(f"constraints cannot be compiled: {error or 'the compiler does not start'}") from None

    def ask(self, constraint: Constraint, limit_s: float) -> str | None:
        """What is wrong with it, if anything. Raises TimeoutError or EOFError; the child is over then."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([constraint.kind, constraint.text]).encode() + b"\n")
        except OSError:
            self.end()
            raise EOFError from None
        found: str | None = json.loads(self._read(limit_s))
        return found

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Once it is over, nothing happens."""
        self._process.kill()
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


def main() -> None:
    """The child. It ends with its input; should whoever started it be gone while it compiles, the limit of processor
    time ends it."""
    folder, vocab_size, stop_ids, limit_s = sys.argv[1:]
    os.nice(5)
    from distspec.constraints.grammar import Compiler
    from distspec.models.tokenizer import load_tokenizer_folder

    compiler = Compiler(load_tokenizer_folder(Path(folder)), int(vocab_size), json.loads(stop_ids))
    if sys.platform == "linux":  # others do not say how large a process is
        size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
    print(flush=True)
    for line in sys.stdin:
        used_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used_s + 2 * float(limit_s)) + 1, resource.RLIM_INFINITY))
        kind, text = json.loads(line)
        try:
            compiler.compile(Constraint(kind=kind, text=text))
        except BadConstraint as error:
            print(json.dumps(str(error)), flush=True)
        else:
            print("null", flush=True)


if __name__ == "__main__":
    main()
