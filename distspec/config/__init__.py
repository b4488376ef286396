"""Fleet configuration: keys by section, checked before anything starts. Knows no Ray, no model, no device."""

from distspec.config.checks import check, check_served
from distspec.config.loading import CONFIGS, ENV_PREFIX, load, named
from distspec.config.sections import (
    FEATURE_DRAFTERS,
    LOCAL_POLICIES,
    MODEL_DRAFTERS,
    Config,
    Coordinator,
    Engine,
    Model,
    Ngram,
    PolicyName,
    Pool,
    Pools,
    Role,
    Server,
    Speculation,
    Suffix,
)

__all__ = [
    "CONFIGS",
    "ENV_PREFIX",
    "FEATURE_DRAFTERS",
    "LOCAL_POLICIES",
    "MODEL_DRAFTERS",
    "Config",
    "Coordinator",
    "Engine",
    "Model",
    "Ngram",
    "PolicyName",
    "Pool",
    "Pools",
    "Role",
    "Server",
    "Speculation",
    "Suffix",
    "check",
    "check_served",
    "load",
    "named",
]
