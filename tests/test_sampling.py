"""Decoding over a cache says what the whole forward pass says, and draws as it was asked to."""

import itertools
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.config import MeshConfig, parse_config
from jaxscale.mesh import make_mesh
from jaxscale.models import sampling
from jaxscale.models.build import shape_decoder, split_decoder
from jaxscale.models.decoder import Tokens
from jaxscale.models.decoder_rules import decoder_rules
from jaxscale.models.sampling import sample_tokens
from tests.tiny import plan_layouts

VOCAB, LENGTH, PROMPT = 130, 24, 9


@cache
def make_shape(family, dtype="float32"):
    sizes = {"layers": 2, "embed": 16, "heads": 4, "mlp": 32, "tied": True}
    if family != "gpt2":
        sizes["kv_heads"] = 2
    moe = {"experts": 4, "top_k": 2, "mlp": 24, "first_dense": 1, "exchange": "capacity"}
    config = parse_config(
        {
            "run_dir": "unused",
            "steps": 1,
            "batch": {"sequences": 1, "length": LENGTH},
            "model": {"family": "llama" if family == "experts" else family, **sizes},
            "moe": {**moe, "eval_capacity_factor": 2.0} if family == "experts" else None,
        },
        origin="this test",
    )
    return replace(shape_decoder(config, vocab=VOCAB, platform="cpu"), dtype=jnp.dtype(dtype))


@cache
def make_decoder(family):
    """A definition and random numbers for every leaf."""
    shape = make_shape(family)
    definition, shapes = split_decoder(shape)
    generator = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(generator.normal(size=leaf.shape) * 0.5, jnp.float32), shapes
    )
    return definition, params


@cache
def make_forward(family):
    """Compiled (ids [LENGTH]) -> logits [LENGTH, VOCAB] of the whole forward pass; later ids are free."""
    definition, params = make_decoder(family)

    @jax.jit
    def forward(params, ids_T):
        places_BT = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        tokens = Tokens(ids_T[None], places_BT, jnp.ones_like(places_BT))
        x_BTD, _ = nnx.merge(definition, params)(tokens)
        return x_BTD[0] @ params["embed"]["table"][:VOCAB].T

    def pad_and_run(ids):
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(ids)] = ids
        return np.asarray(forward(params, padded))

    return pad_and_run


def make_ids():
    return np.random.default_rng(1).integers(0, VOCAB, LENGTH).astype(np.int32)


def sample(family, prompt, **settings):
    definition, params = make_decoder(family)
    settings = {
        "count": LENGTH - PROMPT,
        "temperature": 0.0,
        "top_k": None,
        "end_id": None,
        "seed": 0,
        **settings,
    }
    key = jax.random.key(settings.pop("seed"))
    return list(sample_tokens(definition, params, prompt, key=key, **settings))


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(tensor=2)], ids=["one device", "tensor=2"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "experts"])
def test_cached_decoding_gives_the_logits_of_the_whole_forward_pass(family, mesh):
    """A prompt padded and not, then one token after another, each over what the prompt's padding wrote."""
    definition, params = make_decoder(family)
    shape, ids = make_shape(family), make_ids()
    expected = make_forward(family)(ids)
    assert np.abs(expected).max() > 1

    device_mesh = make_mesh(mesh, jax.devices()[: mesh.tensor])
    rules = decoder_rules(make_shape(family))
    params = jax.device_put(params, plan_layouts(params, rules, device_mesh, 3).params)
    with jax.set_mesh(device_mesh):
        extend = jax.jit(lambda params, *inputs: nnx.merge(definition, params).extend(*inputs))
        empty = nnx.merge(definition, params).make_cache(1, LENGTH)
        assert empty.keys_LBSKH.shape == (2, 1, LENGTH, shape.kv_heads, shape.head)

        prompt = ids[None, :PROMPT]
        logits_BTV, _ = extend(params, prompt, jnp.int32(0), empty)
        np.testing.assert_allclose(logits_BTV[0], expected[:PROMPT], atol=1e-5)

        padded = np.pad(prompt, ((0, 0), (0, LENGTH - PROMPT)))
        logits_BTV, filled = extend(params, padded, jnp.int32(0), empty)
        np.testing.assert_allclose(logits_BTV[0, :PROMPT], expected[:PROMPT], atol=1e-5)
        for place in range(PROMPT, LENGTH):
            logits_BTV, filled = extend(params, ids[None, place : place + 1], jnp.int32(place), filled)
            np.testing.assert_allclose(logits_BTV[0, 0], expected[place], atol=1e-5, err_msg=str(place))


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_temperature_zero_takes_the_likeliest_token_of_the_whole_forward_pass(family):
    """The padded prompt is longer than the gpt2 model has positions; the text itself is not."""
    ids = list(make_ids()[:PROMPT])
    tokens = sample(family, np.array(ids))
    assert len(tokens) == LENGTH - PROMPT
    for token in tokens:
        assert token == make_forward(family)(ids)[len(ids) - 1].argmax()
        ids.append(token)


def test_top_k_draws_among_the_likeliest_only_and_seeds_decide():
    prompt, forward = make_ids()[:PROMPT], make_forward("llama")

    def rank_all(tokens):
        ids, ranks = list(prompt), []
        for token in tokens:
            logits = forward(ids)[len(ids) - 1]
            ranks.append(int((logits > logits[token]).sum()))
            ids.append(token)
        return ranks

    settings = {"temperature": 50.0}
    few = sample("llama", prompt, top_k=3, **settings)
    assert set(rank_all(few)) == {0, 1, 2}
    assert sample("llama", prompt, top_k=3, **settings) == few, "the same seed draws the same text"
    assert sample("llama", prompt, top_k=3, seed=1, **settings) != few
    assert max(rank_all(sample("llama", prompt, **settings))) > 10, "without top_k all tokens are drawn"


def test_top_k_of_one_is_the_likeliest_and_more_than_the_vocabulary_is_all():
    prompt = make_ids()[:PROMPT]
    likeliest = sample("llama", prompt)
    assert sample("llama", prompt, top_k=1, temperature=50.0) == likeliest
    everything = sample("llama", prompt, temperature=2.0)
    assert sample("llama", prompt, top_k=VOCAB + 5, temperature=2.0) == everything


def test_text_ends_before_the_end_token_and_has_at_most_count_tokens():
    prompt = make_ids()[:PROMPT]
    tokens = sample("gpt2", prompt)
    end_id = tokens[3]
    assert sample("gpt2", prompt, end_id=end_id) == tokens[: tokens.index(end_id)]
    unused = next(token for token in range(VOCAB) if token not in tokens)
    assert sample("gpt2", prompt, end_id=unused, count=5) == tokens[:5]
    assert sample("gpt2", prompt, end_id=tokens[0]) == []


def test_prompts_of_one_padded_length_share_their_programs():
    """Compiling takes minutes on a large model; a second prompt must not pay for it again."""
    sample("llama", make_ids()[:PROMPT])
    programs = sampling._extend._cache_size(), sampling._choose._cache_size()
    sample("llama", make_ids()[: PROMPT + 3], seed=1)
    assert (sampling._extend._cache_size(), sampling._choose._cache_size()) == programs


def test_tokens_come_one_at_a_time():
    definition, params = make_decoder("llama")
    stream = sample_tokens(
        definition,
        params,
        make_ids()[:PROMPT],
        count=LENGTH - PROMPT,
        temperature=0,
        top_k=None,
        key=jax.random.key(0),
        end_id=None,
    )
    assert iter(stream) is stream
    assert list(itertools.islice(stream, 3)) == sample("llama", make_ids()[:PROMPT])[:3]


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 3)])
def test_draws_follow_the_softmax_at_the_temperature(temperature, top_k):
    """Blocks that add nothing and a constant embedding make the logits the same at every place."""
    definition, params = make_decoder("gpt2")
    logits = np.full(VOCAB, -60.0)
    logits[:4] = 0.0, 1.0, 2.0, 1.5
    params = jax.tree.map(jnp.zeros_like, params)
    # The embedding is the head: with hidden states of (1, 0, ...) its first column is the logits.
    params["final_norm"]["bias"] = params["final_norm"]["bias"].at[0].set(1.0)
    params["embed"]["table"] = params["embed"]["table"].at[:VOCAB, 0].set(logits)

    count = 600
    tokens = list(
        sample_tokens(
            definition,
            params,
            np.array([5]),
            count=count,
            temperature=temperature,
            top_k=top_k,
            key=jax.random.key(3),
            end_id=None,
        )
    )
    weights = np.exp(logits / temperature)
    if top_k is not None:
        weights[np.argsort(-logits)[top_k:]] = 0
    expected = weights / weights.sum()
    seen = np.bincount(tokens, minlength=VOCAB) / count
    np.testing.assert_allclose(seen, expected, atol=4 * 0.5 / np.sqrt(count))
    assert not seen[expected < 1e-6].any()
