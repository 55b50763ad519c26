"""A model from a Python file that a configuration names (`model: {file: my_model.py}`).

The code in the file is the user's: whatever goes wrong in it is shown with its type, message and line, and
ends the command as any other mistake in a configuration does.
"""

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxscale.config import PythonModelConfig, UserError
from jaxscale.models.adapters import check_losses
from jaxscale.models.model import Model


def load_model(config: PythonModelConfig, *, vocab: int, length: int) -> Model:
    """Imports the file and calls its factory with vocab, length and `config.arguments`.

    The loss is traced once on a small batch, so that it is tried before anything is compiled.

    Args:
      vocab: tokens in the vocabulary.
      length: tokens a sequence.

    Raises:
      UserError: there is no such file or factory, the factory takes other arguments or returns no `Model`,
        the loss returns no pair of scalars, or the code in the file raises something.
    """
    path = _find_file(config.file)
    with _blame_file(config.file, path):
        module = _import_file(path)
    factory = _find_factory(module, config)
    _check_arguments(factory, config)
    with _blame_file(config.file, path):
        model = factory(vocab=vocab, length=length, **config.arguments)
        if not isinstance(model, Model):
            raise UserError(
                f"{config.factory} returned a {type(model).__name__}; return a jaxscale.Model, which "
                "from_nnx, from_linen and from_functions make"
            )
        check_losses(model, length=length)
    return model


def _find_file(file: str) -> Path:
    path = Path(file)
    if path.is_dir():
        raise UserError(f"model.file: {file} is a folder; name the Python file in it")
    if not path.is_file():
        there = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, n=1)
        remedy = f"did you mean {path.parent / near[0]}?" if near else f"paths begin at {Path.cwd()}"
        raise UserError(f"model.file: there is no file {file}; {remedy}")
    if path.suffix != ".py":
        raise UserError(f"model.file: {file} is no Python file; its name has to end with .py")
    return path.resolve()


def _import_file(path: Path) -> ModuleType:
    """Runs the file as a module of a name that nothing else has."""
    name = f"_jaxscale_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "the name ends with .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Modules beside the file are found, as when Python runs it, but hide none that is installed.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module  # where dataclasses and pickles look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _find_factory(module: ModuleType, config: PythonModelConfig) -> Callable[..., Any]:
    factory = getattr(module, config.factory, None)
    if factory is None:
        names = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
        ]
        near = difflib.get_close_matches(config.factory, names, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"its functions are {', '.join(names) or 'none'}"
        raise UserError(f"model.factory: {config.file} has no {config.factory!r}; {remedy}")
    if not callable(factory):
        raise UserError(
            f"model.factory: {config.factory!r} in {config.file} is a {type(factory).__name__}; name a "
            "function that makes the model"
        )
    return factory


def _check_arguments(factory: Callable[..., Any], config: PythonModelConfig) -> None:
    signature = inspect.signature(factory)
    taken = {
        name: parameter.default is parameter.empty
        for name, parameter in signature.parameters.items()
        if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    problems = []
    for name in ("vocab", "length"):
        if name in config.arguments:
            problems.append(
                f"model.arguments.{name}: comes from the run ({_OWN_SOURCES[name]}); take it out of arguments"
            )
        if name not in taken and not takes_any:
            problems.append(f"it takes no {name}; add {name} to its parameters, every factory is given it")
    for name in config.arguments:
        if name not in taken and not takes_any:
            others = [other for other in taken if other not in _OWN_SOURCES]
            near = difflib.get_close_matches(str(name), others, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"it takes {', '.join(others) or 'no arguments'}"
            problems.append(f"model.arguments.{name}: there is no such argument; {remedy}")
    problems += [
        f"model.arguments.{name} has no value, and no default"
        for name, is_needed in taken.items()
        if is_needed and name not in config.arguments and name not in _OWN_SOURCES
    ]
    if problems:
        raise UserError(
            f"model.factory: {config.factory}{signature} in {config.file} cannot be called\n  "
            + "\n  ".join(problems)
        )


_OWN_SOURCES = {"vocab": "model.vocab or the tokenizer", "length": "batch.length"}


@contextmanager
def _blame_file(file: str, path: Path) -> Iterator[None]:
    """Turns whatever the file's code raises into a message that names the file and the line."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except (Exception, SystemExit) as error:  # of other people's code: shown, and raised again
        message = str(error).strip().partition("\n\n")[0]
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
        raise UserError(f"{file}{_find_line(error, path)}: {text}; {_find_remedy(error)}") from error


def _find_line(error: BaseException, path: Path) -> str:
    """`:12` for the innermost line of the file that took part, or nothing."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f":{error.lineno}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    return f":{lines[-1]}" if lines else ""


def _find_remedy(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"install {error.name}, or correct the import"
    return "this is the model's own code: mend it there, or change model.arguments"
