"""How the threads of torch behave in a process that computes.

Knows the environment of OpenMP. Imports no torch, since it must come before it.
"""

from __future__ import annotations

import os


def spin_briefly() -> None:
    """Let OpenMP's threads look out for work for some 10 us between two operations, and sleep then.

    Call it before torch is imported, for GNU's OpenMP reads its environment once. Its own default is to spin for
    seconds: where somebody else wants a core, every operation then waits for a time slice, and a decode step took
    25 times as long. The price is a quarter of the speed of a machine that is all ours (docs/log.md), which
    `OMP_WAIT_POLICY=active` buys back.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
