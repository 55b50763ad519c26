"""Random draws that are normal enough, and the same bits however they are split."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config import MeshConfig
from jaxscale.mesh import make_mesh
from jaxscale.numerics.draw import draw_normal, make_key


@pytest.mark.smoke
def test_draws_are_the_same_bits_in_shards_of_any_width() -> None:
    """Shards of 1 to 13 numbers: where a vector is not full, XLA's logarithm is another one on jax 0.12."""
    mesh = make_mesh(MeshConfig(data=8))
    for width in (1, 2, 3, 5, 8, 13):
        sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
        shape = (64, 8 * width)
        split = jax.jit(lambda key, shape=shape: draw_normal(key, shape, 0.02), out_shardings=sharding)(
            make_key(3)
        )
        whole = jax.jit(lambda key, shape=shape: draw_normal(key, shape, 0.02))(make_key(3))
        np.testing.assert_array_equal(split, whole)


def test_draws_have_the_moments_of_a_normal_distribution() -> None:
    x = np.asarray(draw_normal(make_key(0), (1000, 1000), 0.02), np.float64) / 0.02
    assert abs(x.mean()) < 4e-3
    assert x.std() == pytest.approx(1, abs=3e-3)
    assert (x**3).mean() == pytest.approx(0, abs=0.02)
    assert (x**4).mean() == pytest.approx(3 - 0.15, abs=0.03), "Irwin-Hall of 8 terms"
    assert (np.abs(x) < 1).mean() == pytest.approx(0.6827, abs=0.01)
    assert np.abs(x).max() < 4.9
    assert len(np.unique(x)) > 200_000
    np.testing.assert_array_less(np.abs(np.corrcoef(x[:, ::2].ravel(), x[:, 1::2].ravel())[0, 1]), 0.005)
