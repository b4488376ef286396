"""Models: the Llama family, where its weights and tokenizers come from, and the default model.

Knows decoders over rows and checkpoint folders. Does not know pages, sequences, drafting or Ray.
"""

from distspec.models.base import Attend, Model, Taps
from distspec.models.checkpoint import fingerprint, save_pretrained
from distspec.models.config import ModelConfig, RopeScaling
from distspec.models.llama import prefix_layers, random_model
from distspec.models.loader import load_model, load_tokenizer, model_folder
from distspec.models.tokenizer import same_vocabulary

__all__ = [
    "Attend",
    "Model",
    "ModelConfig",
    "RopeScaling",
    "Taps",
    "fingerprint",
    "load_model",
    "load_tokenizer",
    "model_folder",
    "prefix_layers",
    "random_model",
    "same_vocabulary",
    "save_pretrained",
]
