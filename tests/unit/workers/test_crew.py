"""How a coordinator keeps its workers up, without Ray: whose process cannot begin a life gets another one."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from distspec.config import load
from distspec.errors import FleetError
from distspec.protocol.keys import FleetKeys
from distspec.workers.crew import Crew

NAME = "decode:0"


class Process:
    """Stands for an actor. lost: what it says when a life is to begin; None: it begins."""

    def __init__(self, lost: str | None) -> None:
        self.lost, self.joined = lost, list[int]()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: _Answer(lambda: self._answer(name, *arguments)))

    def _answer(self, name: str, *arguments: Any) -> object:
        if name == "join":
            if self.lost:
                raise FleetError(self.lost)
            self.joined.append(arguments[1])
        return "node"


class _Answer:
    def __init__(self, action: Any) -> None:
        self._action = action

    def future(self) -> Future[object]:
        found: Future[object] = Future()
        try:
            found.set_result(self._action())
        except FleetError as error:
            found.set_exception(error)
        return found


async def test_a_process_that_cannot_begin_a_life_is_ended_and_another_made(monkeypatch: pytest.MonkeyPatch) -> None:
    crew, ended = Crew(load("colocated")), list[Process]()
    made = [Process(None), Process(None)]
    monkeypatch.setattr(ray, "kill", ended.append)
    monkeypatch.setattr(
        crew, "_remote", SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: made[-1]))
    )
    crew._endpoint, crew._expect = FleetKeys.create().endpoint("tcp://127.0.0.1:9", term=1), lambda *_: None
    member = crew._members[NAME]
    member.actor = made[0]
    await crew._bring_up(member)
    made[0].lost = "its device computes no more"
    with pytest.raises(FleetError, match="computes no more"):
        await crew._bring_up(member)
    assert ended == [made[0]]
    await crew._bring_up(member)
    assert (made[0].joined, made[1].joined) == ([2**32 + 1], [2**32 + 3])
