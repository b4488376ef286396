"""Every error distspec raises on purpose, in one tree.

    DistspecError
    |- RequestError            a client's fault; carries an HTTP status and the field
    |  |- InvalidField         400
    |  |- ModelNotServed       404
    |  |- Overloaded           429, retry later
    |  `- Unavailable          503, retry later
    |- ConfigError             the operator's fault; carries the path of the key
    |  |- UnknownKey
    |  |- InvalidValue
    |  `- TooLittleMemory      of a GPU; says how much is missing
    |- ModelNotFound           says where it was looked for
    |- ProtocolError           a peer broke the rules of the channel
    |  |- BadMessage
    |  |- HandshakeRefused     names what differs
    |  |- LinkLost             a link ended; its peer comes back as a new incarnation
    |  `- IllegalTransition    nothing was changed
    |- BadConstraint           no grammar, or one that allows nothing; says what is wrong with it
    |- OutOfPages              nothing was allocated
    |- OutOfSlots              nothing was allocated
    |- TransferFailed          a KV link broke; its pages are safe to reuse
    `- FleetError              actors could not be placed, started or reached

An error is raised once, at the boundary where its cause is known, and names what would work.
"""

from __future__ import annotations


class DistspecError(Exception):
    """Root of the tree. Can be pickled, whatever its parts: errors of actors come back as they were raised."""

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[DistspecError], args: tuple[object, ...], parts: dict[str, object]) -> DistspecError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(parts)
    return error


class RequestError(DistspecError):
    """A request that cannot be served as asked.

    field: name of the request field at fault, or None.
    retry_after_s: seconds after which the same request may succeed, or None.
    """

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidField(RequestError):
    code = "invalid_value"

    def __init__(self, field: str, got: object, need: str) -> None:
        super().__init__(f"{field}: got {_short(got)}, need {need}", field)


class ModelNotServed(RequestError):
    status = 404
    code = "model_not_found"

    def __init__(self, model: str, served: list[str]) -> None:
        super().__init__(f"model: {_short(model)} is not served here; served: {', '.join(served)}", "model")


class Overloaded(RequestError):
    status = 429
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class Unavailable(RequestError):
    status = 503
    code = "unavailable"

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


REQUEST_ERRORS: dict[str, type[RequestError]] = {
    kind.code: kind for kind in (RequestError, InvalidField, ModelNotServed, Overloaded, Unavailable)
}


def request_error(code: str, message: str, field: str | None = None) -> RequestError:
    """The request error that a message of the channel names by its code."""
    kind = REQUEST_ERRORS.get(code, RequestError)
    error = kind.__new__(kind)
    RequestError.__init__(error, message, field, retry_after_s=1.0 if kind in (Overloaded, Unavailable) else None)
    return error


class ConfigError(DistspecError):
    """A configuration that cannot be used. path: the key, as `pools.verify.replicas`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class UnknownKey(ConfigError):
    def __init__(self, path: str, nearest: list[str]) -> None:
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        super().__init__(path, f"unknown key{hint}")


class InvalidValue(ConfigError):
    def __init__(self, path: str, got: object, need: str) -> None:
        super().__init__(path, f"got {_short(got)}, need {need}")


class TooLittleMemory(ConfigError):
    """A GPU, or a worker's share of it, is too small for what is asked. missing: bytes, None if unknown."""

    def __init__(self, path: str, message: str, missing: int | None = None) -> None:
        keys = ("model.max_model_len", "engine.max_num_batched_tokens", "engine.max_num_seqs")
        super().__init__(path, f"{message}, or lower {', '.join(keys)} or engine.max_scratch_nodes")
        self.missing = missing


class ModelNotFound(DistspecError):
    def __init__(self, name: str, looked: list[str]) -> None:
        super().__init__(f"model {name!r} not found; looked in: {'; '.join(looked)}")


class ProtocolError(DistspecError):
    """A peer broke the rules of the channel."""


class BadMessage(ProtocolError):
    """Bytes that are no message of this protocol version."""


class HandshakeRefused(ProtocolError):
    def __init__(self, peer: str, differs: dict[str, tuple[str, str]]) -> None:
        parts = ", ".join(f"{key}: fleet has {want}, {peer} has {got}" for key, (want, got) in differs.items())
        super().__init__(f"{peer} refused: {parts}")
        self.differs = differs


class LinkLost(ProtocolError):
    """A link ended. refused: it never began, because the other side would not have this peer."""

    def __init__(self, reason: str, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class IllegalTransition(ProtocolError):
    """An event that the present state does not allow; nothing was changed."""


class BadConstraint(DistspecError):
    """What an output must be is no grammar, or one that cannot be held to, or allows nothing."""


class OutOfPages(DistspecError):
    def __init__(self, need: int, free: int) -> None:
        super().__init__(f"{need} KV pages needed, {free} free; lower max_num_seqs or raise engine.num_pages")
        self.need = need
        self.free = free


class OutOfSlots(DistspecError):
    def __init__(self, slots: int) -> None:
        super().__init__(f"all {slots} slots are taken; raise engine.max_num_seqs")


class TransferFailed(DistspecError):
    """A KV link broke or was closed; the receiver's pages are safe to reuse."""


class FleetError(DistspecError):
    """Actors could not be placed, started or reached."""


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
