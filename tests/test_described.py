"""What can be said of described chips without their compilers."""

import os
import re
import subprocess
import sys

import pytest

from jaxscale.config import UserError
from jaxscale.planning import described
from jaxscale.planning.described import describe_devices, find_compiler, list_gpu_targets


@pytest.mark.parametrize(
    ("platform", "packages"),
    [("tpu", "libtpu"), ("gpu", "jax-cuda13-plugin and nvidia-cudnn-cu13")],
)
def test_a_missing_compiler_is_told_apart_and_named_with_its_extra(monkeypatch, platform, packages):
    monkeypatch.setattr(described, "_is_installed", lambda module: False)
    assert find_compiler(platform) is None
    with pytest.raises(UserError) as caught:
        describe_devices(platform, "h100", (1, 8))
    message = str(caught.value)
    assert f"needs {packages}" in message
    assert f"pip install 'jaxscale[plan-{platform}]'" in message


@pytest.mark.parametrize(
    ("platform", "chip", "topology", "complaint"),
    [
        ("gpu", "h900", (1, 8), "known are a100, b200, h100, h200"),
        ("gpu", "h100", (8,), "NODESxCHIPS"),
        ("gpu", "h100", (0, 8), "h100:0x8: every size"),
        ("tpu", "v5p", (), "every size"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(monkeypatch, platform, chip, topology, complaint):
    monkeypatch.setattr(described, "_is_installed", lambda module: True)
    with pytest.raises(UserError, match=re.escape(complaint)):
        describe_devices(platform, chip, topology)


def test_every_target_names_its_card_and_capability():
    assert list_gpu_targets() == ("a100", "b200", "h100", "h200")
    for name in list_gpu_targets():
        text = (described._TARGETS / f"{name}.txtpb").read_text(encoding="utf-8")
        assert name.upper() in re.search(r'device_description_str: "(.*)"', text)[1]
        assert "cuda_compute_capability" in text


def test_the_environment_is_set_before_any_backend_and_leaves_what_the_user_set():
    script = (
        "import os; from jaxscale.planning.described import prepare_description; prepare_description();"
        "import jax; print(jax.default_backend(), os.environ['TPU_SKIP_MDS_QUERY'],"
        " os.environ['TPU_WORKER_HOSTNAMES'], jax.config.jax_enable_compilation_cache)"
    )
    environment = {**os.environ, "TPU_WORKER_HOSTNAMES": "mine"}
    environment.pop("JAX_PLATFORMS", None)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["cpu", "1", "mine", "False"], done.stderr
