"""What all workers of a fleet must agree on, by name."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from distspec.config import Config
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

    speculation = config.speculation
    drafter: str = speculation.drafter
    if drafter == "ngram":
        drafter += f" of {speculation.ngram.min_n} to {speculation.ngram.max_n} tokens"
    elif drafter == "standalone" and speculation.draft_model is not None:
        folder = models.model_folder(speculation.draft_model, models.DRAFT_FIELD)
        drafter += f" {models.fingerprint(folder, models.DRAFT_FIELD)}"
    elif speculation.drafter not in ("none", "suffix") and speculation.draft_model is not None:
        folder = models.model_folder(speculation.draft_model, models.DRAFT_FIELD)
        drafter += f" {models.draft_fingerprint(folder)}"
    found = {
        **package(),
        "model": models.fingerprint(models.model_folder(config.model.name)),
        "dtype": config.model.dtype,
        "pages": f"{config.engine.page_size} tokens",
        "drafter": drafter,
        "logprobs": config.engine.logprobs_mode,
        "torch": torch.__version__.partition("+")[0],
    }
    if device.type == "cuda":
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(map(str, version))
    return found
