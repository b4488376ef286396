"""What all workers of a fleet must agree on, by name."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

import msgspec

from distspec.config import MODEL_DRAFTERS, Config, Speculation
from distspec.protocol.messages import PROTOCOL_VERSION

if TYPE_CHECKING:
    import torch


def package() -> dict[str, str]:
    """The part that needs no model."""
    return {"distspec": metadata.version("distspec"), "protocol": str(PROTOCOL_VERSION)}


def fingerprint(config: Config, device: torch.device) -> dict[str, str]:
    """Reads the models' folders. Raises ModelNotFound, ConfigError."""
    import torch  # the coordinator needs `package` alone

    from distspec import models

    spec = config.speculation
    found = {
        **package(),
        "model": models.fingerprint(models.model_folder(config.model.name)),
        "dtype": config.model.dtype,
        "pages": f"{config.engine.page_size} tokens",
        "drafter": _guesser(spec.drafter, spec),
        "fallback": _guesser(spec.fallback, spec),
        "acceptance": spec.acceptance,
        "synthetic acceptance": str(spec.synthetic_acceptance),
        "logprobs": config.engine.logprobs_mode,
        "torch": torch.__version__.partition("+")[0],
    }
    if device.type == "cuda":
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(map(str, version))
    return found


def _guesser(name: str, spec: Speculation) -> str:
    """A drafter, with all that its guesses follow from beside the text."""
    from distspec import models

    options: dict[str, object] = {"ngram": spec.ngram, "suffix": spec.suffix}
    if name in options:
        return f"{name} {msgspec.to_builtins(options[name])}"
    if name not in MODEL_DRAFTERS or spec.draft_model is None:
        return name
    folder = models.model_folder(spec.draft_model, models.DRAFT_FIELD)
    if name == "standalone":
        return f"{name} {models.fingerprint(folder, models.DRAFT_FIELD)}"
    return f"{name} {models.draft_fingerprint(folder)}"
