"""Partition rules of the decoder: parameter path -> dim names. Dims to axes: `jaxscale.sharding.rules`."""

from jaxscale.sharding.rules import Rules

_LLAMA = {
    "embed/table": ("vocab", "embed"),
    "layers/attention_norm/scale": ("layers", "norm"),
    "layers/attention/query/kernel": ("layers", "embed", "heads", "head"),
    "layers/attention/key/kernel": ("layers", "embed", "kv_heads", "head"),
    "layers/attention/value/kernel": ("layers", "embed", "kv_heads", "head"),
    "layers/attention/out/kernel": ("layers", "heads", "head", "embed"),
    "layers/mlp_norm/scale": ("layers", "norm"),
    "layers/mlp/gate/kernel": ("layers", "embed", "mlp"),
    "layers/mlp/up/kernel": ("layers", "embed", "mlp"),
    "layers/mlp/down/kernel": ("layers", "mlp", "embed"),
    "final_norm/scale": ("norm",),
}

_GPT2 = {
    **{path: dims for path, dims in _LLAMA.items() if "gate" not in path},
    "positions/table": ("positions", "embed"),
    "layers/attention_norm/bias": ("layers", "norm"),
    "layers/attention/query/bias": ("layers", "heads", "head"),
    "layers/attention/key/bias": ("layers", "kv_heads", "head"),
    "layers/attention/value/bias": ("layers", "kv_heads", "head"),
    "layers/attention/out/bias": ("layers", "norm"),
    "layers/mlp_norm/bias": ("layers", "norm"),
    "layers/mlp/up/bias": ("layers", "mlp"),
    "layers/mlp/down/bias": ("layers", "norm"),
    "final_norm/bias": ("norm",),
}

_HEAD = {"head/table": ("vocab", "embed")}


def decoder_rules(family: str, *, tied: bool) -> Rules:
    """The rule table of a decoder; a tied model has no head of its own."""
    rules = {"llama": _LLAMA, "gpt2": _GPT2}[family]
    return Rules(rules if tied else {**rules, **_HEAD})
