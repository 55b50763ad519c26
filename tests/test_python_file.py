"""A model from a Python file that the configuration names, and every mistake on the way."""

import os
import sys

import jax
import pytest

from jaxscale.config import PythonModelConfig, UserError
from jaxscale.models.model import Model
from jaxscale.models.python_file import load_model
from jaxscale.sharding.rules import iterate_leaves

FILE = """\
import jax.numpy as jnp
from jaxscale.models.adapters import from_functions
from jaxscale.models.losses import token_cross_entropy
from jaxscale.sharding.rules import REPLICATED
import my_layers

def loss(params, batch, keys_B):
    logits_BTV = params["table"][batch["tokens"]]
    return token_cross_entropy(logits_BTV, batch["labels"], batch["weights"])

def make_model(vocab, length, width=8, *, depth=1):
    if width < 0:
        raise ValueError(f"width {width} is negative")
    init = lambda key: {"table": jnp.full((vocab, vocab + my_layers.EXTRA), width / length)}
    return from_functions(init, loss, rules={"table": ("vocab", "embed")})

def make_nothing(vocab, length):
    return {"vocab": vocab}

def make_means(vocab, length):
    init = lambda key: {"a": jnp.ones(2)}
    return from_functions(init, lambda p, b, k: p["a"].mean(), rules={"a": REPLICATED})

def make_broken_loss(vocab, length):
    def loss(params, batch, keys_B):
        return params["a"] @ jnp.ones((3, 3))
    return from_functions(lambda key: {"a": jnp.ones(2)}, loss, rules={"a": REPLICATED})

def make_exit(vocab, length):
    raise SystemExit("no more")

def make_without_length(vocab):
    return None

NUMBER = 3
"""


@pytest.fixture
def model_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_layers", raising=False)
    (tmp_path / "my_layers.py").write_text("EXTRA = 3\n", encoding="utf-8")
    (tmp_path / "my_model.py").write_text(FILE, encoding="utf-8")
    (tmp_path / "no_syntax.py").write_text("import jax\n\ndef make_model(:\n", encoding="utf-8")
    (tmp_path / "no_package.py").write_text("import jax\nimport not_there\n", encoding="utf-8")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "models").mkdir()
    return tmp_path


def _load(file="my_model.py", **fields) -> Model:
    return load_model(PythonModelConfig(file=file, **fields), vocab=5, length=4)


def _paths(model: Model) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in iterate_leaves(model.shapes)}


def test_a_file_gives_a_model_of_the_runs_vocabulary_length_and_arguments(model_folder):
    model = _load(arguments={"width": 2})
    assert _paths(model) == {"table": (5, 8)}
    assert float(model.init(jax.random.key(0))["table"][0, 0]) == 0.5


def test_a_file_is_read_anew_each_time(model_folder):
    assert _paths(_load()) == {"table": (5, 8)}
    path = model_folder / "my_model.py"
    path.write_text(FILE.replace("my_layers.EXTRA", "11"), encoding="utf-8")
    os.utime(path, (0, 0))  # Python's own cache looks at size and time
    assert _paths(_load()) == {"table": (5, 16)}


FILE_MISTAKES = {
    "no such file": ({"file": "my_modle.py"}, ("there is no file my_modle.py", "did you mean my_model.py?")),
    "no such folder": ({"file": "nowhere/x.py"}, ("there is no file nowhere/x.py", "paths begin at")),
    "a folder": ({"file": "models"}, ("models is a folder", "name the Python file in it")),
    "no Python file": ({"file": "notes.txt"}, ("notes.txt is no Python file", ".py")),
    "no such factory": ({"factory": "make_modle"}, ("has no 'make_modle'", "did you mean make_model?")),
    "no factory at all": ({"factory": "zzz"}, ("has no 'zzz'", "its functions are loss, make_model")),
    "factory that is no function": ({"factory": "NUMBER"}, ("'NUMBER' in my_model.py is a int",)),
    "unknown and shadowed arguments": (
        {"arguments": {"widht": 3, "vocab": 7}},
        (
            "make_model(vocab, length, width=8, *, depth=1) in my_model.py cannot be called",
            "model.arguments.widht: there is no such argument; did you mean width?",
            "model.arguments.vocab: comes from the run (model.vocab or the tokenizer)",
        ),
    ),
    "missing argument": (
        {"factory": "loss", "arguments": {"params": 1, "batch": 2}},
        ("it takes no vocab; add vocab", "it takes no length", "model.arguments.keys_B has no value"),
    ),
    "factory without length": ({"factory": "make_without_length"}, ("it takes no length; add length",)),
    "another result": (
        {"factory": "make_nothing"},
        ("my_model.py: make_nothing returned a dict", "return a jaxscale.Model"),
    ),
    "a loss of means": (
        {"factory": "make_means"},
        ("my_model.py: make_means.<locals>.<lambda> returned float32[]", "two scalars"),
    ),
    "error in the factory": (
        {"arguments": {"width": -1}},
        ("my_model.py:13: ValueError: width -1 is negative", "model.arguments"),
    ),
    "error in the loss": ({"factory": "make_broken_loss"}, ("my_model.py:26: TypeError: ", "(2,)")),
    "exit in the factory": ({"factory": "make_exit"}, ("my_model.py:30: SystemExit: no more",)),
    "error of syntax": ({"file": "no_syntax.py"}, ("no_syntax.py:3: SyntaxError",)),
    "missing package": (
        {"file": "no_package.py"},
        ("no_package.py:2: ModuleNotFoundError: No module named 'not_there'; install not_there",),
    ),
}


@pytest.mark.parametrize("name", FILE_MISTAKES)
def test_a_mistake_in_a_models_file_is_one_message_with_its_line_and_remedy(model_folder, name):
    fields, said = FILE_MISTAKES[name]
    with pytest.raises(UserError) as caught:
        _load(**fields)
    for part in said:
        assert part in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_file_that_fails_leaves_no_module_behind(model_folder):
    with pytest.raises(UserError):
        _load("no_package.py")
    assert "_jaxscale_model_no_package" not in sys.modules
