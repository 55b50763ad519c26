"""Which activations the backward pass finds in memory, computes again, or fetches from the host.

A model names tensors (`name_tensor`) and marks the function whose inside may be computed again (`remat`);
the configuration's section `remat` decides for both (`use_remat`). Nothing here changes a number: a tensor
that is computed again is the same function of the same inputs.

Sizes: B sequences, T tokens, D embed, F mlp, N query heads, K key/value heads of H channels.
"""

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, Recompute, Saveable, checkpoint_name

from jaxscale.config import RematConfig

# The tensors of a decoder's block: what each is, and its shape. What mlp_down returns has no name: nothing
# in the backward pass reads it.
DECODER_TENSORS = {
    "block_input": "the residual stream as it enters the block, always kept or offloaded: [B, T, D]",
    "attention_norm": "what the query, key and value projections read: [B, T, D]",
    "query": "queries as attention reads them, rotated: [B, T, N, H]",
    "key": "keys as attention reads them, rotated: [B, T, K, H]",
    "value": "values: [B, T, K, H]",
    "attention": "what attention returns, with the softmax statistics of splash and cuDNN: [B, T, N, H]",
    "attention_out": "what attention adds to the residual stream: [B, T, D]",
    "mlp_norm": "what the MLP's projections, or router and experts, read: [B, T, D]",
    "mlp_up": "result of the up projection: [B, T, F]",
    "mlp_gate": "result of the gate projection, of Llama: [B, T, F]",
    "mlp_hidden": "what the down projection reads: [B, T, F]",
    "expert_input": "tokens as they reached their experts: [rows, D]",
    "expert_up": "result of the experts' up projection: [rows, F]",
    "expert_gate": "result of the experts' gate projection, of Llama: [rows, F]",
    "expert_hidden": "what the experts' down projection reads: [rows, F]",
    "expert_out": "what each choice's expert returned for each token: [tokens, choices, D]",
}
DECODER_MATMULS = (
    *("query", "key", "value", "attention_out", "mlp_up", "mlp_gate"),
    *("expert_input", "expert_up", "expert_gate", "expert_out"),
)


def list_tensors(*, gated: bool, dense: bool, experts: bool) -> list[str]:
    """Names of the tensors that a decoder has.

    Args:
      gated: whether its MLPs have a gate.
      dense: whether any layer has a dense MLP or shared experts; `experts`: whether any has experts.
    """
    left_out = {"mlp_gate", "expert_gate"} if not gated else set()
    if not dense:
        left_out |= {"mlp_up", "mlp_gate", "mlp_hidden"}
    return [
        name
        for name in DECODER_TENSORS
        if name not in left_out and (experts or not name.startswith("expert_"))
    ]


# Kernels that keep their results and statistics under no name of ours.
_NAMED_KERNELS = {"dot_product_attention_fwd_wrapper": "attention"}

_KEEP_ALL = RematConfig()
_remat: ContextVar[RematConfig] = ContextVar("remat", default=_KEEP_ALL)


@contextmanager
def use_remat(config: RematConfig) -> Iterator[None]:
    """Within it, programs are traced with this choice of what is kept."""
    token = _remat.set(config)
    try:
        yield
    finally:
        _remat.reset(token)


def name_tensor(x: jax.Array, name: str) -> jax.Array:
    """Names an activation, so that `remat.keep`, `recompute` and `offload` can choose it.

    The name belongs on the array that later operations read: what was made from an unnamed copy is not found.
    """
    return checkpoint_name(x, name)


def remat(
    function: Callable[..., Any], *, in_scan: bool = False, matmuls: Sequence[str] | None = None
) -> Callable[..., Any]:
    """The function, of which a backward pass keeps what the section `remat` of the configuration says.

    Wrap what a model repeats, such as a layer; its inputs are kept. Outside a run, everything is kept.

    Args:
      in_scan: whether it is the body of a `lax.scan`, where the compiler needs no barrier that holds it from
        merging the computation with its repetition.
      matmuls: names of the tensors that the policy `matmuls` keeps; None: the result of every matmul without
        a batch dim.
    """
    config = _remat.get()
    if config.is_off:
        return function
    decide = partial(_decide, config, matmuls)
    return jax.checkpoint(function, policy=decide, prevent_cse=not in_scan)


def keep_named(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where everything is kept: the function, of which only the decoder's named tensors are.

    For a function in a `lax.scan` that gathers kernels by itself: they would be kept whole, of all layers.
    Where the configuration computes anything again, its choice holds and the function is as it was.
    """
    if not _remat.get().is_off:
        return function
    policy = jax.checkpoint_policies.save_only_these_names(*DECODER_TENSORS)
    return jax.checkpoint(function, policy=policy, prevent_cse=False)


def kept_by_name(config: RematConfig, name: str, matmuls: Sequence[str] | None = DECODER_MATMULS) -> bool:
    """Whether the backward pass finds a named tensor in memory, on the device or the host."""
    if name in config.recompute:
        return False
    if name in config.keep + config.offload:
        return True
    by_policy = {"attention": ("attention",), "matmuls": matmuls or (), "full": ()}
    return config.policy == "none" or name in by_policy[config.policy]


def find_name(primitive: Any, params: Any) -> str | None:
    """The name that an operation of a traced program gives its results."""
    return params["name"] if primitive.name == "name" else _NAMED_KERNELS.get(primitive.name)


def find_remat_problems(config: RematConfig, tensors: Sequence[str] | None) -> list[str]:
    """Names that stand in two lists, that no tensor has, or that cannot be computed again.

    Args:
      tensors: names of the model's tensors; None: not known before it is traced.
    """
    names = config.named
    problems = [
        f"remat: {name} stands in {' and '.join(kind for kind, some in config.lists.items() if name in some)}"
        "; name it once"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if tensors is None:
        if config.policy == "matmuls" and config.recompute:
            problems.append(
                f"remat.recompute={list(config.recompute)}: policy matmuls keeps every matmul of a model of "
                "your own, whatever its name; take policy full, and list in `keep` what is to be kept"
            )
        return problems
    problems += [word_unknown(name, tensors) for name in dict.fromkeys(names) if name not in tensors]
    if "block_input" in config.recompute:
        problems.append("remat.recompute: block_input is what all else is computed from; keep or offload it")
    return problems


def word_unknown(name: str, tensors: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, tensors, n=1)
    return f"remat: the model has no tensor {name!r}; " + (
        f"it has {', '.join(tensors)}" + (f"; did you mean {near[0]}?" if near else "")
        if tensors
        else "it names none: jaxscale.name_tensor(x, name) does"
    )


def _decide(
    config: RematConfig, matmuls: Sequence[str] | None, primitive: Any, *avals: Any, **params: Any
) -> Any:
    """What becomes of an operation's results between the passes; a policy of `jax.checkpoint`."""
    name = find_name(primitive, params)
    if name is not None:
        if name in config.offload:
            return Offloadable(src="device", dst="pinned_host")
        return Saveable if kept_by_name(config, name, matmuls) else Recompute
    keeps_matmuls = config.policy == "matmuls" and matmuls is None
    if keeps_matmuls and jax.checkpoint_policies.dots_with_no_batch_dims_saveable(
        primitive, *avals, **params
    ):
        return Saveable
    return Recompute
