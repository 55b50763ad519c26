"""Text from a decoder: a prompt, then one token after another over a key/value cache."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.models.decoder import Cache, Decoder
from jaxscale.models.model import NO_INPUTS, RouterInputs

_PROMPT_MULTIPLE = 64  # prompts are padded to it, so that few lengths are compiled


def sample_tokens(
    definition: nnx.GraphDef,
    params: Any,
    prompt: np.ndarray,
    *,
    count: int,
    temperature: float,
    top_k: int | None,
    key: jax.Array,
    end_id: int | None,
    routers: RouterInputs = NO_INPUTS,
) -> Iterator[int]:
    """Yields up to `count` token ids that follow a prompt, ending before `end_id`.

    Args:
      definition, params: a `Decoder` split by NNX; parameters may lie over `tensor`.
      prompt: 1-D token ids, at least one.
      temperature: 0 takes the likeliest token; 1 draws from the model's distribution.
      top_k: draws among so many likeliest tokens only; None: among all.
      routers: what routers are handed beside their parameters.
    """
    length = -(-len(prompt) // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(prompt)] = prompt
    cache = nnx.merge(definition, params).make_cache(1, length + count)

    # What the padding wrote beyond the prompt is overwritten before any token may look at it.
    logits_BTV, cache = _extend(definition, params, routers, jnp.asarray(padded), cache, jnp.int32(0))
    logits_V = logits_BTV[0, len(prompt) - 1]
    for place in range(count):
        token = int(_choose(logits_V, jax.random.fold_in(key, place), temperature, top_k))
        if token == end_id:
            return
        yield token
        if place + 1 < count:
            ids_BT = jnp.full((1, 1), token, jnp.int32)
            logits_BTV, cache = _extend(
                definition, params, routers, ids_BT, cache, jnp.int32(len(prompt) + place)
            )
            logits_V = logits_BTV[0, -1]


# Compiled once for every prompt of the same padded length, so these stand outside of `sample_tokens`.
@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _extend(
    definition: nnx.GraphDef,
    params: Any,
    routers: RouterInputs,
    ids_BT: jax.Array,
    cache: Cache,
    start: jax.Array,
) -> tuple[jax.Array, Cache]:
    decoder: Decoder = nnx.merge(definition, params)
    return decoder.extend(ids_BT, start, cache, routers)


@partial(jax.jit, static_argnums=(2, 3))
def _choose(logits_V: jax.Array, key: jax.Array, temperature: float, top_k: int | None) -> jax.Array:
    if temperature == 0:
        return jnp.argmax(logits_V)
    if top_k is not None:
        least = jax.lax.top_k(logits_V, min(top_k, logits_V.size))[0][-1]
        logits_V = jnp.where(logits_V >= least, logits_V, -jnp.inf)
    return jax.random.categorical(key, logits_V / temperature)
