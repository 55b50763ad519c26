"""Partition rules of the decoder: parameter path -> dim names. Dims to axes: `jaxscale.sharding.rules`."""

from jaxscale.models.shape import DecoderShape
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


_EXPERTS = {
    "experts/router/kernel": ("layers", "embed", "router"),
    "experts/up/kernel": ("layers", "experts", "embed", "mlp"),
    "experts/gate/kernel": ("layers", "experts", "embed", "mlp"),
    "experts/down/kernel": ("layers", "experts", "mlp", "embed"),
}


def decoder_rules(shape: DecoderShape) -> Rules:
    """The rule table of a decoder; a tied model has no head of its own."""
    rules = {"llama": _LLAMA, "gpt2": _GPT2}[shape.family]
    if not shape.tied:
        rules = {**rules, **_HEAD}
    return Rules(rules if shape.experts is None else _add_experts(rules, shape))


def _add_experts(rules: dict[str, tuple[str, ...]], shape: DecoderShape) -> dict[str, tuple[str, ...]]:
    """The table of a model whose layers are of two kinds: dense ones, and those with experts."""
    assert shape.experts is not None
    table = {path: dims for path, dims in rules.items() if not path.startswith("layers/")}
    layer = {path.removeprefix("layers/"): dims for path, dims in rules.items() if path not in table}
    if shape.dense_layers:
        table |= {f"dense_layers/{path}": dims for path, dims in layer.items()}
    for path, dims in layer.items():
        if not path.startswith("mlp/"):
            table[f"expert_layers/{path}"] = dims
        elif shape.experts.shared:
            table[f"expert_layers/experts/shared/{path.removeprefix('mlp/')}"] = dims
    has_gate = shape.family == "llama"
    return table | {
        f"expert_layers/{path}": dims for path, dims in _EXPERTS.items() if has_gate or "/gate/" not in path
    }
