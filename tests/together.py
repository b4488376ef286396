"""How tests are spread over processes.

`pytest -n 2` gives all of tests/ray to one process, which begins with them and does one after the other: they have one
cluster, and wait more than they compute. The other one does the rest, until both share what is left.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling


class Together(LoadScopeScheduling):
    """Tests of real actors are one scope, the largest and so the first; any other test is one of its own."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/ray" if nodeid.startswith("tests/ray/") else nodeid
