"""A request as the coordinator keeps it: its tokens, its tree, what each worker holds of it, its futures.

Knows the legal transitions and the books of one request. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from distspec.coordinator.feed import Feed
from distspec.coordinator.notes import Kept
from distspec.coordinator.origins import Origins
from distspec.coordinator.promises import Advice
from distspec.errors import IllegalTransition
from distspec.protocol.messages import Drafted
from distspec.protocol.values import ROOT, Node, SamplingParams, TokenLogprobs, Usage
from distspec.speculation.tree import Step, Tree


class State(Enum):
    QUEUED = "queued"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    LEASED = "leased"
    REVOKING = "revoking"
    DRIVEN = "driven"
    DONE = "done"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.PREFILL, State.DONE}),
    State.PREFILL: frozenset({State.TRANSFER, State.LEASED, State.DRIVEN, State.QUEUED, State.DONE}),
    State.TRANSFER: frozenset({State.LEASED, State.DRIVEN, State.QUEUED, State.DONE}),
    State.LEASED: frozenset({State.REVOKING, State.QUEUED, State.DONE}),
    State.REVOKING: frozenset({State.LEASED, State.DRIVEN, State.QUEUED, State.DONE}),
    State.DRIVEN: frozenset({State.LEASED, State.QUEUED, State.DONE}),
    State.DONE: frozenset(),
}


@dataclass(slots=True)
class Holding:
    """What a target worker will hold of a request once it has handled everything sent to it.

    epoch: the request's when it was opened there; opened: whether a message that opens it was sent (before,
    only the credit is taken). computed: committed positions with KV. nodes: live nodes with KV. commit, drop:
    fates of its nodes that the next message tells it. ticket: its KV is on the way from `source`. judged: live nodes,
    and the root, whose outcome it has told; reached: the first so many committed positions were judged there.
    """

    epoch: int
    opened: bool = False
    computed: int = 0
    nodes: set[int] = field(default_factory=set)
    commit: list[int] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)
    ticket: int | None = None
    source: str | None = None
    sent_s: float = 0.0
    judged: set[int] = field(default_factory=set)
    reached: int = 0

    def take_fates(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        fates = tuple(self.commit), tuple(self.drop)
        self.commit, self.drop = [], []
        return fates

    @property
    def said(self) -> int:
        """Committed positions that the worker knows to be committed."""
        return self.computed - len(self.commit)


@dataclass(slots=True)
class Task:
    """A verify or prefill future. root: the tree's root when it was sent; nodes: what it judges.

    base: committed positions that its worker was known to hold before it. withdrawn: its worker was told that
    nobody waits for it any more.
    """

    worker: str
    root: int
    nodes: tuple[int, ...]
    base: int
    sent_s: float
    withdrawn: bool = False


@dataclass(slots=True)
class Drafting:
    """The drafter's side: it was told `told` committed tokens.

    opened: whether it was ever asked; before, only the credit is taken. task: the draft on its way, quick: of the
    fallback drafter. asked: since the root changed. dry: it had nothing to add to the present tree. feed: of features,
    where it reads any.
    """

    worker: str
    epoch: int
    opened: bool = False
    told: int = 0
    task: int | None = None
    quick: bool = False
    asked: bool = False
    sent_s: float = 0.0
    dry: bool = False
    feed: Feed = field(default_factory=Feed)

    def rooted(self) -> None:
        """The root changed: the drafter may have something to say again."""
        self.asked = self.dry = False

    def unanswerable(self) -> None:
        """Features that the draft on its way waits for will not come: it is to be asked for anew."""
        if not self.quick:
            self.task = None
            self.rooted()


@dataclass(slots=True)
class Tally:
    """Counts that become the Usage of the terminal message."""

    cached: int = 0
    rounds: int = 0
    hits: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    first_s: float | None = None

    def note(self, counts: list[int], depth: int) -> None:
        counts.extend([0] * (depth + 1 - len(counts)))
        counts[depth] += 1


class Request:
    """One stream. tokens: prompt and output, all committed; emitted: how many of them are output.

    acting: the policy in force, which `auto` changes by advice; tuned: output tokens when it last did. bound_for: the
    policy whose verifiers it has.
    fits: it was held to the limits of the fleet. refusals: times it was given up since its last token. carried: by
    position, the nodes that were committed since all speculative work was last void. logprobs, prompt_logprobs:
    what the client was not sent yet, of the last tokens and of the prompt.
    """

    def __init__(
        self,
        number: int,
        client: str,
        key: str,
        prompt: Sequence[int],
        emitted: Sequence[int],
        params: SamplingParams,
        policy: str,
        steps: int | None,
        now: float,
    ) -> None:
        self.number, self.client, self.key = number, client, key
        self.prompt_length = len(prompt)
        self.tokens: list[int] = [*prompt, *emitted]
        self.params, self.policy, self.steps = params, policy, steps
        self.acting = policy if policy != "auto" else "ar"
        self.bound_for = ""
        self.advice: Advice | None = None
        self.tuned = 0
        self.state = State.QUEUED
        self.epoch = 0
        self.tree = Tree()
        self.holds: dict[str, Holding] = {}
        self.tasks: dict[int, Task] = {}
        self.home: str | None = None
        self.prefiller: str | None = None
        self.drafting: Drafting | None = None
        self.avoid: set[str] = set()
        self.prefills_at_home = False
        self.fits = False
        self.refusals = 0
        self.depths: dict[int, int] = {}
        self.carried: dict[int, int] = {}
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs = b""
        self.origins = Origins()
        self.tally = Tally()
        self.arrived_s = now
        self.leased_s = now

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_length

    def move(self, state: State) -> None:
        """Change state. Raises IllegalTransition, and changes nothing, where the table has no such arrow."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"request {self.number}: {self.state.value} -> {state.value}")
        self.state = state

    def commit(self, step: Step) -> list[Kept]:
        """Take one token of the walk, and note for every worker what becomes of the nodes it holds.

        Returns which futures it came of.
        """
        position = len(self.tokens)
        self.tokens.append(step.token)
        if step.logprobs is not None:
            self.logprobs.append(step.logprobs)
        gone = set(step.died)
        for hold in self.holds.values():
            if step.node is not None and step.node in hold.nodes:
                hold.nodes.remove(step.node)
                hold.commit.append(step.node)
                hold.computed = position + 1
            if step.root in hold.judged:
                hold.reached = position
                hold.judged.remove(step.root)
            if gone:
                hold.drop.extend(sorted(hold.nodes & gone))
                hold.nodes -= gone
                hold.judged -= gone
        if step.node is not None:
            self.carried[position] = step.node
        accepted = self._count(step)
        if self.drafting is not None:
            self.drafting.rooted()
        if step.node is None:
            self.epoch += 1
            if self.drafting is not None and step.children:
                self.drafting.task = None  # it grows what is gone; but where nothing was there yet, it may grow this
        return self.origins.step(step, accepted)

    def missing(self, worker: str, nodes: Iterable[int]) -> list[Node]:
        """The nodes of these paths that `worker` has not computed, parents first, as messages say them."""
        held, tree, root = self.holds[worker].nodes, self.tree, self.tree.root
        out: dict[int, Node] = {}
        for node in nodes:
            path = []
            while node != root and node not in held and node not in out:  # who holds a node holds what is above it
                known = tree[node]
                path.append((node, known))
                node = known.parent
            for node, known in reversed(path):
                out[node] = Node(node, ROOT if known.parent == root else known.parent, known.token)
        return list(out.values())

    def graft(self, proposal: Drafted, most: int) -> int:
        """Hang a tree below the text of `proposal.base` tokens where the text has gone since; how many nodes are new.

        What the text left behind is left out, and so is what could never be emitted, or makes more than `most` nodes.
        """
        tokens: Sequence[int] = proposal.tokens
        parents: Sequence[int] = proposal.parents
        scores: Sequence[float] = proposal.scores
        if proposal.base < len(self.tokens):
            kept = _below(tokens, parents, self.tokens[proposal.base :])
            index = {node: i for i, node in enumerate(kept)}
            tokens, parents = [tokens[i] for i in kept], [index.get(parents[i], ROOT) for i in kept]
            scores = [scores[i] for i in kept] if scores else ()
        before, deepest = self.tree.newest, self.params.max_tokens - self.emitted - 1
        self.tree.add(self.tree.root, tokens, parents, scores, most, deepest)
        new = range(before + 1, self.tree.newest + 1)
        if new:
            self.origins.drafted(proposal.task, new)
        return len(new)

    def stale(self) -> list[int]:
        """Futures whose nodes are all dead, and whose workers were not told yet.

        A node that was committed is none of them: its worker is to keep it.
        """
        out = []
        for number, task in self.tasks.items():
            hold = self.holds[task.worker]
            wanted = task.root in self.tree or any(node in self.tree or node in hold.commit for node in task.nodes)
            if not task.withdrawn and not wanted:
                out.append(number)
        return out

    def computed_by(self, worker: str) -> int:
        """Committed positions that this worker holds for sure, whatever it is still busy with."""
        bases = [task.base for task in self.tasks.values() if task.worker == worker]
        return min(bases, default=self.holds[worker].said)

    def has_judged(self, worker: str) -> int:
        """Committed positions that this worker has computed for sure, some of which may be nodes to it."""
        return max(self.computed_by(worker), self.holds[worker].reached)

    def unfeed(self, worker: str) -> None:
        """Features that were to come from this worker will not."""
        if self.drafting is not None and self.drafting.feed.leave(worker):
            self.drafting.unanswerable()

    def in_flight(self) -> set[int]:
        return {node for task in self.tasks.values() for node in (task.root, *task.nodes)}

    def submitted(self, nodes: Collection[int]) -> None:
        """Nodes go out; those that do for the first time are counted, by their depth below the root of that moment."""
        self.tree.submit(nodes)
        for node in nodes:
            if node not in self.depths:
                self.depths[node] = self.tree.depth(node) - 1
                self.tally.note(self.tally.drafted, self.depths[node])

    def void(self) -> None:
        """All speculative work and all futures of this request are void."""
        self.epoch += 1
        for hold in self.holds.values():
            hold.drop.extend(hold.nodes)
            hold.nodes.clear()
            hold.judged.clear()
        self.tree.reset()
        self.tasks.clear()
        self.depths.clear()
        self.carried.clear()
        self.origins.clear()
        if self.drafting:
            self.drafting.task = None
            self.drafting.rooted()

    def usage(self, now: float) -> Usage:
        tally = self.tally
        return Usage(
            prompt_tokens=self.prompt_length,
            cached_tokens=tally.cached,
            completion_tokens=self.emitted,
            rounds=tally.rounds,
            drafted=sum(tally.drafted),
            accepted=sum(tally.accepted),
            position_drafted=tuple(tally.drafted),
            position_accepted=tuple(tally.accepted + [0] * (len(tally.drafted) - len(tally.accepted))),
            policy=self.policy,
            first_token_s=(tally.first_s if tally.first_s is not None else now) - self.arrived_s,
            total_s=now - self.arrived_s,
            hits=tally.hits,
        )

    def _count(self, step: Step) -> bool:
        """Whether the token was that of a node sent to be judged; its depth is tallied."""
        depth = self.depths.pop(step.node, None) if step.node is not None else None
        if depth is not None:
            self.tally.note(self.tally.accepted, depth)
        for node in self.depths.keys() & step.died:
            del self.depths[node]
        return depth is not None


def _below(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> list[int]:
    """What hangs below the end of a text, of a tree that begins where the text does: indices, parents first."""
    at, matched, inside, out = ROOT, 0, {ROOT}, list[int]()
    for i, parent in enumerate(parents):
        if matched < len(text):
            if parent == at and tokens[i] == text[matched]:
                at, matched, inside = i, matched + 1, {i}
        elif parent in inside:
            inside.add(i)
            out.append(i)
    return out
