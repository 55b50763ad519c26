"""Model FLOPs of a run against the peak of its devices."""

from jaxscale.metrics import model_flops_utilisation
from jaxscale.training.setup import Setup


class Throughput:
    """Knows what a token costs and what the mesh could do."""

    def __init__(self, setup: Setup):
        self._setup = setup
        count_flops = setup.model.flops_per_token
        self._flops_per_token = count_flops(setup.config.batch.length) if count_flops else None

    def utilisation(self, tokens_per_second: float) -> float | None:
        """MFU by the convention of `jaxscale.metrics.flops`; None where FLOPs or peak are not known."""
        if self._flops_per_token is None:
            return None
        devices = self._setup.mesh.devices
        return model_flops_utilisation(
            tokens_per_second,
            self._flops_per_token,
            devices=devices.size,
            device_kind=devices.flat[0].device_kind,
            compute=self._setup.config.precision.compute,
        )
