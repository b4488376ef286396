"""What a fleet can take: the limits of a request, the credits of each worker, and who gets the next request.

One credit is one request open on a worker: taken when the message that opens it is sent, returned by Freed or
Refused. KV room is an estimate by lengths; a worker may still refuse, and the request is queued again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from distspec.coordinator.routing import PrefixIndex
from distspec.curve import Curve
from distspec.errors import IllegalTransition, InvalidField
from distspec.protocol.messages import Hello
from distspec.protocol.values import SamplingParams

OPEN_COST = 64
"""What one more open request weighs against uncached prompt tokens when a worker is chosen."""


MOST_LOGPROBS = 250_000
"""Of one prompt, which travel as one message and are written into one answer, where each takes some 80 bytes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What every request must fit in, whichever target workers it meets. longest: prompt and output, in tokens."""

    vocab_size: int
    longest: int

    def fit(self, prompt: Sequence[int], params: SamplingParams) -> SamplingParams:
        """The parameters, with max_tokens cut to what the prompt leaves. Raises InvalidField."""
        if not all(0 <= token < self.vocab_size for token in prompt):
            raise InvalidField("prompt", "a token id outside the vocabulary", f"ids 0 to {self.vocab_size - 1}")
        if len(prompt) >= self.longest:
            raise InvalidField("prompt", f"{len(prompt)} tokens", f"at most {self.longest - 1}, and one for the answer")
        told = len(prompt) * (1 + (params.prompt_logprobs or 0))
        if params.prompt_logprobs is not None and told > MOST_LOGPROBS:
            need = f"less, {MOST_LOGPROBS} logprobs in all; the prompt has {len(prompt)} tokens"
            raise InvalidField("prompt_logprobs", params.prompt_logprobs, need)
        return structs.replace(params, max_tokens=min(params.max_tokens, self.longest - len(prompt)))


@dataclass(slots=True)
class Worker:
    """A worker that is in the fleet. curve: what wider steps cost it, by its own word. opened: requests open there, by
    number, with their latest known length.

    offences: nonsense that it drafted; barred: too much of it, nobody asks it for drafts any more.
    """

    hello: Hello
    curve: Curve
    out: int = 0
    opened: dict[int, int] = field(default_factory=dict)
    draining: bool = False
    offences: int = 0
    barred: bool = False

    @property
    def credits(self) -> int:
        return 0 if self.draining else self.hello.slots - self.out

    def has_room(self, tokens: int) -> bool:
        """Whether a request of this length fits beside what is open, by estimate; always if nothing is."""
        if not self.opened:
            return True
        page = self.hello.page_size
        used = sum(length + 2 * page for length in self.opened.values())
        return used + tokens + 2 * page <= self.hello.capacity


class Credits:
    """The workers of the fleet and what is open on each."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.prefixes = PrefixIndex()

    def join(self, hello: Hello) -> None:
        self.workers[hello.worker] = Worker(hello, Curve.doubling(hello.step_cost))
        self.prefixes.forget(hello.worker)

    def leave(self, worker: str) -> None:
        self.workers.pop(worker, None)
        self.prefixes.forget(worker)

    def role(self, role: str) -> list[str]:
        """Workers of this role that take new work."""
        return [name for name, worker in self.workers.items() if worker.hello.role == role and not worker.draining]

    def spare(self, role: str) -> list[str]:
        """Workers of this role that have more than half of their credits left."""
        return [name for name in self.role(role) if 2 * self.workers[name].credits > self.workers[name].hello.slots]

    def limits(self, room: int) -> Limits | None:
        """Of the target workers that are here; None if there are none. room: scratch nodes beside a request."""
        targets = [worker.hello for worker in self.workers.values() if worker.hello.role != "draft"]
        if not targets:
            return None
        longest = min(min(hello.max_model_len, hello.capacity - 2 * hello.page_size - room) for hello in targets)
        return Limits(min(hello.vocab_size for hello in targets), longest)

    def take(self, worker: str, request: int, tokens: int) -> None:
        """One credit is out. The caller has seen that there is one."""
        entry = self.workers[worker]
        entry.out += 1
        entry.opened[request] = tokens

    def grow(self, worker: str, request: int, tokens: int) -> None:
        if request in self.workers[worker].opened:
            self.workers[worker].opened[request] = tokens

    def close(self, worker: str, request: int) -> None:
        """The request is being dropped there: its room counts as free, its credit is still out."""
        if worker in self.workers:
            self.workers[worker].opened.pop(request, None)

    def give_back(self, worker: str) -> None:
        """Raises IllegalTransition if none is out."""
        entry = self.workers[worker]
        if not entry.out:
            raise IllegalTransition(f"{worker} gives back a credit that nobody took")
        entry.out -= 1

    def choose(self, candidates: Iterable[str], tokens: Sequence[int]) -> str | None:
        """The worker with a credit and room that has least to do for this request; None if there is none."""

        def cost(name: str) -> tuple[int, str]:
            uncached = len(tokens) - self.prefixes.matched(name, tokens)
            return uncached + OPEN_COST * self.workers[name].out, name

        return self._cheapest(candidates, len(tokens), cost)

    def least_loaded(self, candidates: Iterable[str], tokens: int) -> str | None:
        return self._cheapest(candidates, tokens, lambda name: (self.workers[name].out, name))

    def _cheapest(self, candidates: Iterable[str], tokens: int, cost: Callable[[str], tuple[int, str]]) -> str | None:
        able = [name for name in candidates if self._can_take(name, tokens)]
        return min(able, key=cost, default=None)

    def _can_take(self, name: str, tokens: int) -> bool:
        worker = self.workers.get(name)
        return worker is not None and worker.credits > 0 and worker.has_room(tokens)
