"""A hand-written training loop in plain JAX and optax, to measure jaxscale against.

    python scripts/plain_loop.py --microbatches 4

What an expert writes in an afternoon: a Llama-style decoder, its layers stacked, scanned and rematerialised,
bf16 compute over fp32 parameters, plain jit over a mesh of simulated CPU devices. Prints one JSON line.
"""

import argparse
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5, help="timed steps, after 2 that warm up")
for name, default in (("microbatches", 1), ("data", 1), ("fsdp", 4), ("tensor", 2)):
    parser.add_argument(f"--{name}", type=int, default=default)
ARGS = parser.parse_args()
DEVICES = ARGS.data * ARGS.fsdp * ARGS.tensor
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (  # the timeout: busy cores make simulated devices late, which aborts the program
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES} "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

LAYERS, EMBED, MLP, HEADS, KV_HEADS, HEAD, VOCAB = 4, 256, 1024, 8, 4, 32, 8192
LENGTH, SEQUENCES, WARM_UP_STEPS, BATCH = 128, 16, 2, ("data", "fsdp")
SHAPES = {  # name: (shape, sharding); stacked layers first
    "embed": ((VOCAB, EMBED), P("tensor", "fsdp")),
    "head": ((EMBED, VOCAB), P("fsdp", "tensor")),
    "final_norm": ((EMBED,), P()),
    "attention_norm": ((LAYERS, EMBED), P()),
    "mlp_norm": ((LAYERS, EMBED), P()),
    "q": ((LAYERS, EMBED, HEADS, HEAD), P(None, "fsdp", "tensor")),
    "k": ((LAYERS, EMBED, KV_HEADS, HEAD), P(None, "fsdp", "tensor")),
    "v": ((LAYERS, EMBED, KV_HEADS, HEAD), P(None, "fsdp", "tensor")),
    "out": ((LAYERS, HEADS, HEAD, EMBED), P(None, "tensor", None, "fsdp")),
    "gate": ((LAYERS, EMBED, MLP), P(None, "fsdp", "tensor")),
    "up": ((LAYERS, EMBED, MLP), P(None, "fsdp", "tensor")),
    "down": ((LAYERS, MLP, EMBED), P(None, "tensor", "fsdp")),
}
constrain = jax.lax.with_sharding_constraint
decayed = {name: "norm" not in name for name in SHAPES}
adamw = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)


def init(key):
    params = {name: jnp.ones(shape) for name, (shape, _) in SHAPES.items()}
    for name in filter(decayed.get, SHAPES):
        key, mine = jax.random.split(key)
        params[name] = 0.02 * jax.random.normal(mine, params[name].shape)
    return params, optimizer.init(params)


def rms_norm(x_BTD, scale_D):
    x32 = x_BTD.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-5) * scale_D).astype(x_BTD.dtype)


def rotate(x_BTNH):
    angles_TH = jnp.outer(jnp.arange(LENGTH), 10_000.0 ** -(jnp.arange(0, HEAD, 2) / HEAD))
    cos, sin = jnp.cos(angles_TH)[:, None], jnp.sin(angles_TH)[:, None]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTNH.dtype)


def sum_loss(params, tokens_BT, labels_BT, segments_BT):
    """Sum of the cross-entropy over all tokens."""
    compute = {name: p.astype(jnp.bfloat16) if decayed[name] else p for name, p in params.items()}
    mask_B1TS = (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]

    @jax.checkpoint
    def layer(x_BTD, w):
        h_BTD = rms_norm(x_BTD, w["attention_norm"])
        q, k, v = (
            constrain(jnp.einsum("btd,dnh->btnh", h_BTD, w[n]), P(BATCH, None, "tensor")) for n in "qkv"
        )
        h_BTNH = jax.nn.dot_product_attention(rotate(q), rotate(k), v, mask=mask_B1TS, is_causal=True)
        x_BTD = constrain(x_BTD + jnp.einsum("btnh,nhd->btd", h_BTNH, w["out"]), P(BATCH))
        h_BTD = rms_norm(x_BTD, w["mlp_norm"])
        h_BTF = constrain(jax.nn.silu(h_BTD @ w["gate"]) * (h_BTD @ w["up"]), P(BATCH, None, "tensor"))
        return constrain(x_BTD + h_BTF @ w["down"], P(BATCH)), None

    embed_VD = constrain(compute.pop("embed"), P("tensor"))  # gathered over fsdp, rows stay apart
    x_BTD = constrain(embed_VD[tokens_BT], P(BATCH))
    head_DV, final_norm_D = compute.pop("head"), compute.pop("final_norm")
    x_BTD = rms_norm(jax.lax.scan(layer, x_BTD, compute)[0], final_norm_D)
    logits_BTV = constrain((x_BTD @ head_DV).astype(jnp.float32), P(BATCH, None, "tensor"))
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, labels_BT).sum()


def train_step(params, opt_state, batch_MBT):
    def add_microbatch(total, batch_BT):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(sum_loss)(params, *batch_BT)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total = jax.lax.scan(add_microbatch, zeros, batch_MBT)[0]
    loss, grads = jax.tree.map(lambda x: x / (SEQUENCES * LENGTH), total)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def seconds_since_process_start():
    start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


def main():
    sizes = (ARGS.data, ARGS.fsdp, ARGS.tensor)
    jax.set_mesh(mesh := jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3))
    params_at = {name: NamedSharding(mesh, spec) for name, (_, spec) in SHAPES.items()}
    everywhere, state = NamedSharding(mesh, P()), jax.eval_shape(init, jax.random.key(0))[1]
    counts_at = {"transform_non_params": lambda _: everywhere}
    state_at = optax.tree.map_params(optimizer, lambda _, place: place, state, params_at, **counts_at)
    params, opt_state = jax.jit(init, out_shardings=(params_at, state_at))(jax.random.key(0))
    rng, batch_at = np.random.default_rng(0), NamedSharding(mesh, P(None, BATCH))

    def next_batch():
        shape = (ARGS.microbatches, SEQUENCES // ARGS.microbatches, LENGTH + 1)
        text = rng.integers(0, VOCAB, shape, np.int32)
        return jax.device_put((text[..., :-1], text[..., 1:], np.ones_like(text[..., 1:])), batch_at)

    batch, start, losses, report = next_batch(), time.monotonic(), [], {}
    step = jax.jit(train_step, donate_argnums=(0, 1), out_shardings=(params_at, state_at, everywhere))
    step = step.lower(params, opt_state, batch).compile()
    report["compile_seconds"] = time.monotonic() - start
    for index in range(WARM_UP_STEPS + ARGS.steps):
        if index == WARM_UP_STEPS:
            start, cpu_start = time.monotonic(), time.process_time()
        params, opt_state, loss = step(params, opt_state, batch)
        batch = next_batch()
        losses.append(float(loss))
        report.setdefault("first_loss_seconds", seconds_since_process_start())
    report["cpu_seconds_per_step"] = (time.process_time() - cpu_start) / ARGS.steps
    report["step_seconds"] = (time.monotonic() - start) / ARGS.steps
    print(json.dumps(report | {"losses": losses}))


if __name__ == "__main__":
    main()
