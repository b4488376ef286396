"""What a process has made by the time it serves, and keeps: modules, classes, configuration, graphs.

Knows Python's collector of cycles. Does not know what is kept.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Let the collector never look at what is here now again; what comes later is collected as ever.

    A worker has some 250,000 such objects, and a full collection stops all of its threads for 0.1 to 0.3 s to find
    that they are still wanted.
    """
    gc.collect()
    gc.freeze()
