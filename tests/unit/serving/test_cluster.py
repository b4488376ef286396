"""Which cluster a command is on, and which fleet there it means, without one."""

from __future__ import annotations

import pytest

from distspec.errors import FleetError
from distspec.serving import cluster
from distspec.workers.names import COORDINATOR, NAMESPACE, actor_name


def _named(monkeypatch: pytest.MonkeyPatch, *fleets: str) -> None:
    """These fleets run, beside actors of others."""
    others = [{"namespace": "other", "name": actor_name("theirs", COORDINATOR)}, {"namespace": NAMESPACE, "name": "x"}]
    ours = [{"namespace": NAMESPACE, "name": actor_name(name, COORDINATOR)} for name in fleets]
    monkeypatch.setattr(cluster.ray.util, "list_named_actors", lambda **_: [*others, *ours])


def test_the_only_fleet_needs_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _named(monkeypatch, "local")
    assert cluster.only_fleet() == "local"


@pytest.mark.parametrize(
    ("fleets", "says"), [([], "no fleet runs"), (["b", "a"], r"several fleets run .*, --name one of them: a, b$")]
)
def test_without_one_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, fleets: list[str], says: str) -> None:
    _named(monkeypatch, *fleets)
    with pytest.raises(FleetError, match=says):
        cluster.only_fleet()


@pytest.mark.parametrize(
    ("address", "environment", "found"),
    [(None, None, "local"), (None, "a:1", "a:1"), ("auto", "a:1", "auto"), (None, "local", "local")],
)
def test_a_cluster_of_ones_own_is_started_only_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch, address: str | None, environment: str | None, found: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    assert cluster.whose(address) == found
