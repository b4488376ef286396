"""Models: the Llama family, where its weights and tokenizers come from, the default model, and draft models.

Knows decoders over rows and checkpoint folders. Does not know pages, sequences, drafting or Ray.
"""

from distspec.models.base import Attend, Model, Taps
from distspec.models.checkpoint import fingerprint, save_pretrained
from distspec.models.config import DRAFT_FIELD, ModelConfig, RopeScaling
from distspec.models.draft import FeatureModel, Target
from distspec.models.draft_checkpoint import draft_fingerprint, load_draft, load_target, read_draft
from distspec.models.llama import prefix_layers, random_model, widened
from distspec.models.loader import load_model, load_tokenizer, model_folder
from distspec.models.tokenizer import TOKENIZER, load_tokenizer_folder, same_vocabulary, stop_ids

__all__ = [
    "DRAFT_FIELD",
    "TOKENIZER",
    "Attend",
    "FeatureModel",
    "Model",
    "ModelConfig",
    "RopeScaling",
    "Taps",
    "Target",
    "draft_fingerprint",
    "fingerprint",
    "load_draft",
    "load_model",
    "load_target",
    "load_tokenizer",
    "load_tokenizer_folder",
    "model_folder",
    "prefix_layers",
    "random_model",
    "read_draft",
    "same_vocabulary",
    "save_pretrained",
    "stop_ids",
    "widened",
]
