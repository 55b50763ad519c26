"""Memory of a step on one device in closed form, before anything compiles.

Arguments are the state and the batch as they lie: exact. Temporaries are buffers that the platform's
compiler was seen to keep (`jaxscale.planning.memory_cpu`, `memory_chips`), summed at the moment at which most
is alive.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jaxscale.mesh import BATCH_AXES
from jaxscale.planning import memory_chips, memory_cpu
from jaxscale.planning.buffers import Buffer, Kind, Moment, find_peak
from jaxscale.planning.draft import Draft, draft_setup
from jaxscale.planning.sizes import measure_sizes
from jaxscale.training.setup import Setup
from jaxscale.training.step import BATCH_DTYPES


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes of one device at the step's peak, as `memory_analysis` splits them."""

    arguments: int
    """State and batch; the state is donated, so that the new one takes its place."""
    temporaries: int
    host: int
    """State and kept activations in the host's memory."""
    by_kind: Mapping[Kind, int]
    """What makes up arguments and temporaries at the peak."""
    moment: Moment
    buffers: tuple[Buffer, ...]
    """All temporaries, those too that are not alive at the peak."""

    @property
    def total(self) -> int:
        """On the device."""
        return self.arguments + self.temporaries


def predict_memory(draft: Draft | Setup) -> MemoryForecast:
    """What the step needs on each device.

    Raises:
      UserError: the model is no decoder: what a model of one's own keeps is known only when it is compiled.
    """
    if isinstance(draft, Setup):
        draft = draft_setup(draft)
    sizes, weights = measure_sizes(draft), draft.laid.weights
    arguments, host = _weigh_arguments(draft)
    compiler = memory_cpu if draft.platform == "cpu" else memory_chips
    buffers = compiler.list_buffers(draft, sizes, weights)
    moments = [
        moment
        for moment in Moment
        if (sizes.dense_layers or moment is not Moment.DENSE)
        and (sizes.expert_layers or moment is not Moment.EXPERTS)
    ]
    moment, alive = find_peak(buffers, moments)
    by_kind = {kind: arguments.get(kind, 0) + alive.get(kind, 0) for kind in {**arguments, **alive}}
    return MemoryForecast(
        arguments=sum(arguments.values()),
        temporaries=sum(alive.values()),
        host=host,
        by_kind=by_kind,
        moment=moment,
        buffers=tuple(buffers),
    )


def _weigh_arguments(draft: Draft) -> tuple[dict[Kind, int], int]:
    """Bytes of the state and the batch on the device by kind, and those on the host."""
    config, laid = draft.config, draft.laid
    sequences = config.batch.sequences
    for axis in BATCH_AXES:
        sequences = -(-sequences // draft.axis_sizes[axis])
    token_bytes = sum(jnp.dtype(dtype).itemsize for dtype in BATCH_DTYPES.values())
    batch = sequences * config.batch.length * token_bytes
    # A CPU has one memory, and its compiler counts what is on the host with the rest.
    is_apart = draft.platform != "cpu"
    kept_on_host = laid.kept_bytes if is_apart and config.offload.master_weights else 0
    moments_on_host = laid.moment_bytes if is_apart and config.offload.optimizer_state else 0
    arguments: dict[Kind, int] = {
        "parameters": laid.kept_bytes - kept_on_host,
        "optimizer": laid.moment_bytes + laid.whole_bytes - moments_on_host,
        "batch": batch,
    }
    return arguments, kept_on_host + moments_on_host
