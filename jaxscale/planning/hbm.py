"""What one device moves to and from its memory in a step, beside the operands of its matmuls.

In closed form, each array as often as XLA's fusions touch it: what is elementwise is one pass over what it
reads and one over what it writes. Caches and what stays in them are left out, so small models look slower
than they are; what fusions put into a matmul is counted here all the same.
"""

from dataclasses import dataclass

from jaxscale.models.remat import kept_by_name
from jaxscale.planning.matmuls import BYTES, Work, count_expert_rows


@dataclass(frozen=True)
class Moved:
    """Bytes that a device reads and writes in a step, for one purpose."""

    what: str
    bytes: float


def list_moved(
    work: Work, *, kept_elements: int, used_elements: int, kept_bytes: int = 4, moment_bytes: int = 8
) -> list[Moved]:
    """Everything but matmuls.

    Args:
      kept_elements: parameters on a device as the optimizer keeps them.
      used_elements: parameters on a device as a step uses them, before any gather.
      kept_bytes: of a parameter as the optimizer keeps it.
      moment_bytes: of the optimizer's state for a parameter (AdamW in fp32: 8).
    """
    item, times = BYTES[work.wide], work.microbatches
    passes = 1 + work.load_passes + _find_share_again(work)
    layers = [
        Moved("elementwise, forward", passes * _count_layer_elements(work) * item * times),
        # Of each result the gradient comes in, of each input one goes out, and the inputs are read again.
        Moved("elementwise, backward", 1.75 * _count_layer_elements(work) * item * times),
    ]
    if work.shape.attention == "xla":
        # Forward: scores fp32 written, read, their softmax written and read in the compute format; backward
        # as much again for it and for its gradient.
        scores = work.shape.layers * work.shape.heads // work.tensor * work.tokens * work.length
        layers.append(Moved("softmax", (passes + 2) * scores * (8 + 2 * item) * times))
    logits = work.tokens * work.shape.padded_vocab // work.tensor
    # Read for the maximum and for the exponentials; these written and read; their gradient written.
    vocabulary = Moved("cross-entropy", logits * (16 + item) * times)
    update = kept_elements * (4 + 2 * (kept_bytes + moment_bytes))
    cast = kept_elements * (kept_bytes + item)
    optimizer = [Moved("optimizer", float(update)), Moved("weights cast", float(cast))]
    if work.microbatches > 1:  # gradients read, accumulators read and written
        optimizer.append(Moved("accumulators", float(used_elements * (item + 8) * times)))
    return [*layers, vocabulary, *optimizer]


def _count_layer_elements(work: Work) -> float:
    """Read and written by what is elementwise in the layers, forward, for a microbatch.

    A norm reads the stream and what is added to it, writes their sum and its own result: 4 D, twice a layer.
    Rotation reads and writes queries and keys; an activation reads up (and gate) and writes hidden.
    """
    shape, tokens = work.shape, work.tokens
    gated = shape.family != "gpt2"
    rotated = 2 * (shape.heads + shape.kv_heads) * shape.head // work.tensor if gated else 0
    streams = shape.layers * tokens * (8 * shape.embed + rotated)
    arrays = 3 if gated else 2
    hidden = shape.dense_layers * tokens * shape.mlp // work.tensor
    if shape.experts is not None:
        rows, local = count_expert_rows(work)
        experts = shape.experts
        hidden += shape.expert_layers * rows * local * experts.mlp // work.tensor
        hidden += shape.expert_layers * tokens * experts.shared * experts.mlp // work.tensor
        # Rows are gathered on the way out and on the way back, and summed by their weights.
        streams += shape.expert_layers * rows * local * 6 * shape.embed
    return streams + arrays * hidden


def _find_share_again(work: Work) -> float:
    """Part of the layers' elementwise work that is done again: all, unless everything is kept or named."""
    if work.remat.is_off:
        return 0.0
    named = ("attention_norm", "query", "key", "mlp_norm", "mlp_hidden")
    return sum(not kept_by_name(work.remat, name) for name in named) / len(named)
