"""Configuration: what a run is, read from YAML and the command line."""

from jaxscale.config.compare import check_same_mathematics
from jaxscale.config.errors import UserError
from jaxscale.config.load import dump_config, flatten_config, load_config, parse_config
from jaxscale.config.memory import OffloadConfig, RematConfig
from jaxscale.config.schema import (
    BatchConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    PythonModelConfig,
)

__all__ = [
    "BatchConfig",
    "Config",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "PythonModelConfig",
    "RematConfig",
    "UserError",
    "check_same_mathematics",
    "dump_config",
    "flatten_config",
    "load_config",
    "parse_config",
]
