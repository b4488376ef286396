"""How the threads of torch behave in a process that computes.

Knows the environment of OpenMP and the cores of this host. Imports no torch, so that it can come before it.
"""

from __future__ import annotations

import os


def spin_briefly() -> None:
    """Let OpenMP's threads look out for work for some 0.2 ms between two operations, and sleep then.

    Call it before torch is imported, for GNU's OpenMP reads its environment once. Its own default is to spin for
    seconds: where somebody else wants a core, every operation then waits for a time slice, and a decode step took
    25 times as long; passive waiting costs a fifth of a quiet machine's speed (docs/log.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
