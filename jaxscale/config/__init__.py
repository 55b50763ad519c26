"""Configuration: what a run is, read from YAML and the command line."""

from jaxscale.config.compare import check_same_mathematics
from jaxscale.config.errors import UserError
from jaxscale.config.experts import MoeConfig
from jaxscale.config.load import dump_config, flatten_config, load_config, parse_config
from jaxscale.config.memory import OffloadConfig, RematConfig
from jaxscale.config.optimizers import OptimizerConfig, check_origin
from jaxscale.config.schema import (
    BatchConfig,
    Config,
    DataConfig,
    Fp8Config,
    LossScaleConfig,
    MeshConfig,
    ModelConfig,
    NonfiniteConfig,
    PrecisionConfig,
    PythonModelConfig,
)

__all__ = [
    "BatchConfig",
    "Config",
    "DataConfig",
    "Fp8Config",
    "LossScaleConfig",
    "MeshConfig",
    "ModelConfig",
    "MoeConfig",
    "NonfiniteConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "PythonModelConfig",
    "RematConfig",
    "UserError",
    "check_origin",
    "check_same_mathematics",
    "dump_config",
    "flatten_config",
    "load_config",
    "parse_config",
]
