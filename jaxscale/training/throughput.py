"""Model FLOPs of a run against the peak of its devices."""

from jaxscale.metrics import model_flops_per_token, model_flops_utilisation
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.training.setup import Setup


class Throughput:
    """Knows what a token costs and what the mesh could do."""

    def __init__(self, setup: Setup):
        self._setup = setup
        shape = setup.shape
        matmuls = sum(
            leaf.size for path, leaf in iterate_leaves(setup.model.shapes) if path.endswith("/kernel")
        )
        self._flops_per_token = model_flops_per_token(
            matmuls + shape.vocab * shape.embed,
            shape.layers,
            shape.heads,
            shape.head,
            setup.config.batch.length,
        )

    def utilisation(self, tokens_per_second: float) -> float | None:
        """MFU by the convention of `jaxscale.metrics.flops`; None where no peak is known."""
        devices = self._setup.mesh.devices
        return model_flops_utilisation(
            tokens_per_second,
            self._flops_per_token,
            devices=devices.size,
            device_kind=devices.flat[0].device_kind,
            compute=self._setup.config.precision.compute,
        )
