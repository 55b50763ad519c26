"""jaxscale trains large models in JAX by declaring where tensors live.

The command line is `jaxscale train | inspect | verify | generate | eval`. With a model of your own:

    import jaxscale as js

    rules = js.Rules({"embed/embedding": ("vocab", "embed"), "norm/scale": js.REPLICATED})
    trainer = js.Trainer(js.from_nnx(MyModel, loss, rules=rules), "my_run.yaml")
    trainer.verify()
    trainer.fit()

Importing this package imports neither JAX nor Flax, which simulated devices have to be asked for before: what
needs them is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxscale.config import Config, UserError, load_config, parse_config

if TYPE_CHECKING:
    from jaxscale.models.adapters import from_functions, from_linen, from_nnx
    from jaxscale.models.losses import token_cross_entropy
    from jaxscale.models.model import Model
    from jaxscale.models.remat import name_tensor, remat
    from jaxscale.sharding.activations import constrain
    from jaxscale.sharding.rules import REPLICATED, Rules
    from jaxscale.trainer import Trainer

__all__ = [
    "REPLICATED",
    "Config",
    "Model",
    "Rules",
    "Trainer",
    "UserError",
    "constrain",
    "from_functions",
    "from_linen",
    "from_nnx",
    "load_config",
    "name_tensor",
    "parse_config",
    "remat",
    "token_cross_entropy",
]
__version__ = "0.1.0"

_HOMES = {
    "REPLICATED": "sharding.rules",
    "Model": "models.model",
    "Rules": "sharding.rules",
    "Trainer": "trainer",
    "constrain": "sharding.activations",
    "from_functions": "models.adapters",
    "from_linen": "models.adapters",
    "from_nnx": "models.adapters",
    "name_tensor": "models.remat",
    "remat": "models.remat",
    "token_cross_entropy": "models.losses",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxscale' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxscale.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
