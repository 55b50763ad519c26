"""Device and host bytes of offloaded state by the TPU's compiler, and of four ways to stream an update.

    scripts/install_chip_compilers PYTHON FOLDER
    export TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_PLATFORMS=cpu PYTHONPATH=FOLDER
    python scripts/study_offload.py

Prints the two tables of docs/memory.md, for 4 described v5p chips. Nothing runs: about 3 CPU-minutes.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config import parse_config
from jaxscale.sharding.host_moves import read_host_moves
from jaxscale.training.offload import expect_host_traffic
from jaxscale.training.setup import make_setup
from tests.chips import describe_tpu

MIB = 2**20
DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
MESH = {"data": 2, "fsdp": 2}
TREE: dict[str, Any] = {
    "run_dir": "unused",
    "steps": 1000,
    "mesh": MESH,
    "batch": {"sequences": 8, "microbatches": 2, "length": 512},
    "model": {"family": "llama", "layers": 16, "embed": 1024, "heads": 8, "mlp": 2816, "vocab": 8192},
    "precision": "bf16",
    "remat": "full",
}
WAYS = {
    "nothing": {},
    "optimizer state": {"optimizer_state": True},
    "and master weights": {"optimizer_state": True, "master_weights": True},
}


def main() -> None:
    print(
        "| on the host | device: arguments | temporaries | host: arguments | temporaries ",
        "| moved a step | compiled |",
        sep="",
    )
    print("|---|---|---|---|---|---|---|")
    for name, offload in WAYS.items():
        config = parse_config({**TREE, "offload": offload}, origin="study")
        setup = make_setup(config, describe_tpu("v5p:2x2x1", **MESH), 8192)
        traffic = expect_host_traffic(setup.abstract_state)
        compiled: Any = setup.compile_step()
        columns = [
            f"{each.to_device / MIB:,.1f} + {each.to_host / MIB:,.1f}"
            for each in (traffic, read_host_moves(compiled.as_text()))
        ]
        print(f"| {name} | {word_memory(compiled)} | {' | '.join(columns)} |", flush=True)
    print()
    print("| AdamW on 16 layers | device: arguments | temporaries | host: arguments | temporaries |")
    print("|---|---|---|---|---|")
    for name, update in UPDATES.items():
        print(f"| {name} | {word_memory(compile_update(update))} |", flush=True)


def word_memory(compiled: Any) -> str:
    memory = compiled.memory_analysis()
    sizes = (
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.host_argument_size_in_bytes,
        memory.host_temp_size_in_bytes,
    )
    return " | ".join(f"{size / MIB:,.1f}" for size in sizes)


def update_adam(g: jax.Array, m: jax.Array, v: jax.Array, p: jax.Array) -> tuple[jax.Array, ...]:
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    return m, v, p - 1e-3 * m / (jnp.sqrt(v) + 1e-8)


def move(arrays: Any, space: Any) -> Any:
    return jax.tree.map(lambda array: jax.device_put(array, space), arrays)


def update_whole(g_LDF: jax.Array, *state: jax.Array) -> tuple[jax.Array, ...]:
    return update_adam(g_LDF, *move(state, DEVICE))


def update_in_scan(g_LDF: jax.Array, *state: jax.Array) -> tuple[jax.Array, ...]:
    def visit(_: None, layer: tuple) -> tuple[None, tuple]:
        g_DF, *held = layer
        return None, move(update_adam(g_DF, *move(held, DEVICE)), HOST)

    return lax.scan(visit, None, (g_LDF, *state))[1]


def update_in_loop(g_LDF: jax.Array, *state: jax.Array) -> tuple[jax.Array, ...]:
    def visit(layer: jax.Array, state: tuple) -> tuple:
        g_DF, *held = (lax.dynamic_index_in_dim(each, layer, keepdims=False) for each in (g_LDF, *state))
        new = move(update_adam(g_DF, *move(held, DEVICE)), HOST)
        return tuple(
            lax.dynamic_update_index_in_dim(whole, part, layer, 0)
            for whole, part in zip(state, new, strict=True)
        )

    return lax.fori_loop(0, g_LDF.shape[0], visit, state)


def update_unrolled(g_LDF: jax.Array, *state: jax.Array) -> tuple[jax.Array, ...]:
    for layer in range(g_LDF.shape[0]):
        new = move(update_adam(g_LDF[layer], *move([each[layer] for each in state], DEVICE)), HOST)
        state = tuple(
            lax.dynamic_update_index_in_dim(whole, part, layer, 0)
            for whole, part in zip(state, new, strict=True)
        )
    return state


UPDATES: dict[str, Callable[..., tuple[jax.Array, ...]]] = {
    "moved whole": update_whole,
    "`lax.scan` that returns the slices": update_in_scan,
    "unrolled, in place": update_unrolled,
    "`lax.fori_loop`, in place": update_in_loop,
}


def compile_update(update: Callable[..., Any]) -> Any:
    """Gradients [16, 1024, 1024] on the device; moments and parameters, 48 MiB a device, on the host."""
    mesh = describe_tpu("v5p:2x2x1", fsdp=4)
    on_device = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    on_host = on_device.with_memory_kind("pinned_host")
    shape = (16, 1024, 1024)
    gradients = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on_device)
    state = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on_host)] * 3
    with jax.set_mesh(mesh):
        step = jax.jit(update, donate_argnums=(1, 2, 3), out_shardings=(on_host,) * 3)
        return step.lower(gradients, *state).compile()


if __name__ == "__main__":
    main()
