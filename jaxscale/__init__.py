"""jaxscale trains large models in JAX by declaring where tensors live.

The command line is `jaxscale train | generate | eval`; from Python, `load_config` and
`jaxscale.training.loop.train` do the same.
Importing this package imports neither JAX nor Flax: simulated devices have to be asked for before JAX starts.
"""

from jaxscale.config import Config, UserError, load_config, parse_config

__all__ = ["Config", "UserError", "load_config", "parse_config"]
__version__ = "0.1.0"
