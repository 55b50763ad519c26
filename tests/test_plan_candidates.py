"""What a plan chooses among, and how it is laid out without devices."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from jaxscale.config import Config, MeshConfig, load_config
from jaxscale.planning.candidates import Candidate, describe_own, enumerate_candidates, list_divisors
from jaxscale.planning.sketch import Sketcher
from jaxscale.training.setup import find_mesh, make_setup
from jaxscale.training.traffic import expected_traffic

CONFIGS = Path(__file__).parents[1] / "configs"


def load(name: str, *overrides: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def legal(config: Config, devices: int, **options: object) -> Iterator[Candidate]:
    sketcher = Sketcher(config, config.model.vocab or 257, "tpu")
    for candidate in enumerate_candidates(config, devices, **options):
        if not sketcher.find_problems(candidate):
            yield candidate


def test_divisors() -> None:
    assert list_divisors(12) == [1, 2, 3, 4, 6, 12]
    assert list_divisors(16) == [1, 2, 4, 8, 16]
    assert list_divisors(1) == [1]


def test_meshes_are_every_factorisation_once() -> None:
    found = list(enumerate_candidates(load("llama3_8b"), 16))
    assert len(found) == len(set(found))
    for candidate in found:
        sizes = candidate.mesh
        assert sizes.pipe * sizes.data * sizes.fsdp * sizes.expert * sizes.tensor == 16
        assert sizes.expert == 1  # a dense model
        assert 512 % (candidate.batch_ways * candidate.microbatches) == 0
    at_stage_3 = {each.mesh for each in found if each.zero_stage == 3}
    # fsdp of 2 to 16 and what is left of 16 over data and tensor; fsdp=1 only where no batch axis is larger.
    assert len(at_stage_3) == sum(len(list_divisors(16 // fsdp)) for fsdp in (2, 4, 8, 16)) + 1
    assert {each.mesh.fsdp for each in found if each.zero_stage < 2} == {1}


def test_leaves_that_do_not_divide_are_no_candidates() -> None:
    # 8 heads of keys and values: tensor=16 does not divide them
    assert {each.mesh.tensor for each in legal(load("llama3_8b"), 16)} == {1, 2, 4, 8}


def test_experts_lie_over_their_axis() -> None:
    meshes = {each.mesh for each in legal(load("mixtral_8x7b"), 64)}
    assert {mesh.expert for mesh in meshes} == {1, 2, 4, 8}


def test_what_is_fixed_stays() -> None:
    config = load("llama3_8b", "mesh.tensor=4", "remat=attention", "batch.microbatches=4", "zero.stage=3")
    fixed = {"mesh.tensor", "remat", "batch.microbatches", "zero", "offload"}
    found = list(enumerate_candidates(config, 16, fixed=fixed))
    assert {each.mesh.tensor for each in found} == {4}
    assert {each.remat.policy for each in found} == {"attention"}
    assert {each.microbatches for each in found} == {4}
    assert {each.zero_stage for each in found} == {3}
    assert {each.offload.is_off for each in found} == {True}


def test_microbatches_that_are_mathematics_stay() -> None:
    config = load("mixtral_8x7b", "moe.balance_scope=microbatch")
    assert {each.microbatches for each in enumerate_candidates(config, 64)} == {4}


def test_a_candidate_round_trips_through_its_configuration() -> None:
    config = load("llama3_8b")
    for candidate in list(enumerate_candidates(config, 16, computes=("bf16", "fp8")))[::97]:
        assert describe_own(candidate.apply(config)) == candidate


def test_a_sketch_is_the_setup() -> None:
    """Layouts and closed forms of a sketch are those that the compiled step is made of."""
    config = load("tiny_moe")
    real, mesh = find_mesh(replace(config, mesh=MeshConfig(fsdp=2, expert=4)))
    setup = make_setup(real, mesh, 257)
    sketch = Sketcher(config, 257, "cpu").sketch(describe_own(real))
    assert sketch.config == setup.config
    assert sketch.shape == setup.shape
    assert expected_traffic(sketch) == expected_traffic(setup)


def test_a_thousand_candidates_are_laid_out_in_a_second() -> None:
    config = load("llama3_8b")
    sketcher = Sketcher(config, 128256, "tpu")
    candidates = list(legal(config, 64))[:1000]
    start = time.process_time()
    for candidate in candidates:
        expected_traffic(sketcher.sketch(candidate))
    assert len(candidates) == 1000
    assert time.process_time() - start < 3
