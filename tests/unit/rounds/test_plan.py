"""Which works share a step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.protocol.messages import Extend
from distspec.protocol.values import ROOT, Node
from distspec.rounds.plan import PATIENCE, PREFILL_TOKENS, share
from distspec.rounds.work import Work

sizes = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 5)).filter(any), max_size=8)


def work(arrival: int, tokens: int, nodes: int = 0) -> Work:
    tree = tuple(Node(id=id, parent=ROOT, token=0) for id in range(nodes))
    message = Extend(request=arrival, epoch=0, task=0, start=0, tokens=(0,) * tokens, nodes=tree)
    return Work(message, message.tokens, arrival, nodes=tree)


@settings(deadline=None)
@given(sizes, st.integers(1, 150))
def test_the_budget_is_kept_and_used(shapes: list[tuple[int, int]], budget: int) -> None:
    works = [work(i, *shape) for i, shape in enumerate(shapes)]
    shares = share(works, budget)
    assert all(1 <= rows <= work.rows for work, rows in shares)
    assert sum(rows for _, rows in shares) == min(budget, sum(work.rows for work in works))


def test_decoding_goes_before_prefill_and_prefills_share_the_rest_in_order() -> None:
    first, second, decode = work(0, 60), work(1, 60), work(2, 1, nodes=4)
    assert share([first, second, decode], 80) == [(decode, 5), (first, 60), (second, 15)]


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 4))
def test_nothing_starves_however_small_the_budget(decodes: int, budget: int) -> None:
    prefill = work(0, PREFILL_TOKENS + 1)
    rounds = 0
    while prefill not in [taken for taken, _ in share([prefill, *(work(1 + i, 1) for i in range(decodes))], budget)]:
        rounds += 1
        assert rounds <= PATIENCE
