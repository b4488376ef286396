"""What an actor's process tells of itself, on its standard error, which Ray keeps in a file.

Knows Python's logging. Does not know what is told.
"""

from __future__ import annotations

import logging


def tell() -> None:
    """Write what distspec logs, from INFO on, to standard error. By itself a process of Ray says none below WARNING.

    For processes that are ours alone, since it is a setting of all of it; a second call changes nothing.
    """
    log = logging.getLogger("distspec")
    if log.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
