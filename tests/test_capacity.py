"""Who finds room at an expert, and what becomes of the rest."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.parallel.capacity import Seats, count_slots, seat_tokens
from tests.test_experts import ROUTER, make_arrays, make_moe_config, run_step

TOKENS, EXPERTS = 12, 4


def seat_plainly(
    choice_TK: np.ndarray,
    is_routed_T: np.ndarray,
    certainty_T: np.ndarray,
    *,
    top_k: int,
    factor: float,
    priority: str,
) -> dict[tuple[int, int], int]:
    """(token, expert) -> slot of one sequence, token by token."""
    limit = int(np.ceil(is_routed_T.sum() * top_k / EXPERTS * factor))
    order = np.argsort(-certainty_T, kind="stable") if priority == "probability" else range(TOKENS)
    filled, seats, seated = [0] * EXPERTS, {}, [0] * TOKENS
    for place in range(choice_TK.shape[1]):
        for token in order:
            expert = choice_TK[token, place]
            if is_routed_T[token] and seated[token] < top_k and filled[expert] < limit:
                seats[token, expert] = filled[expert]
                filled[expert] += 1
                seated[token] += 1
    return seats


def draw_choices(rng: np.random.Generator, choices: int) -> np.ndarray:
    """Preferences that crowd on the first experts."""
    favour = rng.random((TOKENS, EXPERTS)) + np.array([1.5, 0.5, 0.2, 0.0])
    return np.argsort(-favour, axis=1)[:, :choices].astype(np.int32)


@pytest.mark.smoke
@pytest.mark.parametrize("priority", ["position", "probability"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 4.0])
@pytest.mark.parametrize(("top_k", "choices"), [(1, 1), (2, 2), (1, 2), (2, 4)])
def test_seats_are_those_that_a_plain_loop_gives(
    top_k: int, choices: int, factor: float, priority: Any
) -> None:
    """More choices than top_k: what found no room goes on to the next."""
    rng = np.random.default_rng(choices)
    choice_BTK = np.stack([draw_choices(rng, choices) for _ in range(3)])
    is_routed_BT = np.stack([np.arange(TOKENS) < count for count in (TOKENS, 7, 0)])
    certainty_BT = rng.random((3, TOKENS)).astype(np.float32)
    seats: Seats = seat_tokens(
        jnp.asarray(choice_BTK),
        jnp.asarray(is_routed_BT),
        jnp.asarray(certainty_BT),
        experts=EXPERTS,
        top_k=top_k,
        factor=factor,
        priority=priority,
    )
    capacity = count_slots(TOKENS, top_k, EXPERTS, factor)
    for row in range(3):
        expected = seat_plainly(
            choice_BTK[row],
            is_routed_BT[row],
            certainty_BT[row],
            top_k=top_k,
            factor=factor,
            priority=priority,
        )
        found = {
            (token, int(seats.expert[row, token, place])): int(seats.slot[row, token, place])
            for token in range(TOKENS)
            for place in range(choices)
            if seats.is_seated[row, token, place]
        }
        assert found == expected
        assert all(0 <= slot < capacity for slot in found.values())


def test_capacity_is_the_published_formula_and_never_more_than_the_tokens() -> None:
    assert count_slots(128, 2, 8, 1.25) == 40
    assert count_slots(100, 1, 64, 1.25) == 2  # rounded up
    assert count_slots(16, 2, 4, 8.0) == 16


# All tokens to one expert. A bias decides alone: sigmoids are less than 1 apart.

CROWD = {
    "router": "sigmoid",
    "balance": "loss+bias",
    "bias_rate": 0.0,
    "top_k": 2,
    "capacity_factor": 1.0,
    "exchange": "capacity",
}
MESH = {"expert": 2, "data": 2, "tensor": 2}


def crowd(moe: dict[str, Any], favoured: int = 2, **sections: Any) -> Any:
    """A step in which every token chooses the same experts, the first ones."""
    config = make_moe_config({**CROWD, **moe}, model={"layers": 1}, **sections)
    bias = np.where(np.arange(8) < favoured, 10.0 - np.arange(8), 0.0).astype(np.float32)[None]
    arrays = make_arrays(config)
    arrays["segments"][:] = 1  # no padding, so that fractions are round numbers
    return run_step(config, arrays, bias)


def find_idle(gradients: dict[str, np.ndarray]) -> list[int]:
    """Experts whose gradients are exactly zero."""
    kernels = [gradients[f"expert_layers/experts/{name}/kernel"] for name in ("up", "gate", "down")]
    return [expert for expert in range(8) if all((kernel[:, expert] == 0).all() for kernel in kernels)]


@pytest.mark.parametrize("mesh", [{}, MESH], ids=["one", "mesh"])
def test_what_has_no_room_is_dropped_and_the_figures_say_so(mesh: dict[str, int]) -> None:
    step = crowd({}, mesh=mesh)
    assert step.metrics["drop_fraction"] == 1 - 2 / 8
    assert step.metrics["load_max"] == 4
    assert step.metrics["load_min"] == 0
    assert find_idle(step.gradients) == [2, 3, 4, 5, 6, 7]
    assert all(np.isfinite(leaf).all() for leaf in step.gradients.values())
    assert np.isfinite(step.metrics["loss"])
    assert np.linalg.norm(step.gradients[ROUTER]) > 0


def test_what_is_dropped_depends_on_no_mesh_and_no_number_of_microbatches() -> None:
    alone, parted = crowd({}), crowd({}, mesh=MESH, batch={"microbatches": 4})
    np.testing.assert_allclose(parted.metrics["loss"], alone.metrics["loss"], rtol=2e-6)
    for path, leaf in alone.gradients.items():
        error = np.linalg.norm(parted.gradients[path] - leaf) / (np.linalg.norm(leaf) or 1)
        assert error <= 1e-5, path


def test_what_has_no_room_goes_on_to_the_next_choices_when_asked_to() -> None:
    step = crowd({"overflow": "reroute"}, mesh=MESH)
    assert step.metrics["drop_fraction"] < 1 - 2 / 8
    assert len(find_idle(step.gradients)) < 6
    assert step.metrics["load_max"] == 4, "loads are counted before anything is dropped or moved on"


def test_dropless_keeps_all() -> None:
    step, roomy = crowd({"exchange": "dropless"}, mesh=MESH), crowd({"capacity_factor": 8.0})
    assert step.metrics["drop_fraction"] == 0
    assert find_idle(step.gradients) == [2, 3, 4, 5, 6, 7]
    np.testing.assert_allclose(step.metrics["loss"], roomy.metrics["loss"], rtol=2e-6)
    for path, leaf in roomy.gradients.items():
        error = np.linalg.norm(step.gradients[path] - leaf) / (np.linalg.norm(leaf) or 1)
        assert error <= 1e-5, path
