"""Reading a configuration: YAML file, then `a.b=c` overrides; every problem in one message."""

import difflib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from jaxscale.config.errors import UserError
from jaxscale.config.schema import Config

_ADAPTER = TypeAdapter(Config)

# Sections that a single value may stand for, and the field that it sets.
_SHORT_FORMS = {"precision": "compute", "remat": "policy"}


def load_config(path: str | Path, overrides: Sequence[str] = (), *, needs_model: bool = True) -> Config:
    """Reads a YAML file and applies overrides (`mesh.fsdp=64`), which win over the file.

    `needs_model=False` is for callers that bring a model of their own.

    Raises:
      UserError: the file cannot be read, or a key or value is wrong; all such problems are listed at once.
    """
    tree = _read_yaml_file(Path(path))
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(tree, origin=str(path), needs_model=needs_model)


def parse_config(tree: Mapping[str, Any], *, origin: str, needs_model: bool = True) -> Config:
    """Turns nested mappings into a `Config`; `origin` names where they came from in errors."""
    if not needs_model and "model" not in tree:
        tree = {**tree, "model": None}
    try:
        return _ADAPTER.validate_python(tree)
    except ValidationError as error:
        problems = sorted({_describe_problem(problem) for problem in error.errors()})
        lines = "\n  ".join(problems)
        raise UserError(f"{origin}: the configuration has {len(problems)} problem(s)\n  {lines}") from None


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, every field present; `load_config` reads back an equal one."""
    out = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None
    yaml.width = 110
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    tree = _listify(asdict(config))
    tree["strategy"] = {dim: axes or "replicated" for dim, axes in tree["strategy"].items()}
    yaml.dump(tree, out)
    return out.getvalue()


def flatten_config(config: Config) -> dict[str, Any]:
    """`{"mesh.data": 2, ...}` for every field."""
    return dict(_flatten(asdict(config), ""))


def _read_yaml_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file{_nearby_files(path)}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; name the YAML file in it") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text (byte {error.start}); save the configuration as UTF-8"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        tree = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {_describe_yaml_error(error)}") from None
    if not isinstance(tree, dict):
        kind = {type(None): "empty", list: "a list", str: "text"}.get(type(tree), repr(tree))
        raise UserError(f"{path}: is {kind}; a configuration is a mapping of sections such as `steps: 100`")
    return tree


def _nearby_files(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = [p.name for p in path.parent.glob("*.yaml")]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _describe_yaml_error(error: YAMLError) -> str:
    """The problem and its line; the rest of ruamel's message is about its own API."""
    if isinstance(error, MarkedYAMLError) and error.problem and error.problem_mark:
        remedy = "; indent with spaces, not tabs" if r"'\t'" in error.problem else ""
        return f"line {error.problem_mark.line + 1}: {error.problem}{remedy}"
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _apply_override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not all(path.split(".")):
        raise UserError(f"{override!r}: an override has the form section.field=value, such as mesh.fsdp=4")
    try:
        value = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise UserError(f"{override!r}: the value is not valid YAML: {_describe_yaml_error(error)}") from None
    *sections, name = path.split(".")
    node = tree
    for section in sections:
        child = node.get(section)
        if child is None:
            child = node[section] = {}
        elif isinstance(child, str) and section in _SHORT_FORMS:
            child = node[section] = {_SHORT_FORMS[section]: child}
        elif not isinstance(child, dict):
            raise UserError(f"{override!r}: {section} is a value ({child!r}), not a section")
        node = child
    node[name] = value


def _describe_problem(problem: Mapping[str, Any]) -> str:
    loc = problem["loc"]
    if not loc:  # of the configuration as a whole: the message names the fields
        return problem["msg"].removeprefix("Value error, ")
    if loc[0] == "model" and len(loc) > 1:  # the second part says which kind of model section it is
        loc = (loc[0], *loc[2:])
    path = ".".join(str(part) for part in loc)
    value, kind = problem["input"], problem["type"]
    if kind == "unread_field":
        return "\n  ".join(f"{path}.{line}" for line in problem["msg"].splitlines())
    if kind in {"unexpected_keyword_argument", "extra_forbidden"}:
        return f"{path}: no such field (value {value!r}){_suggest(path)}"
    if kind in {"missing", "missing_argument", "missing_keyword_only_argument"}:
        return f"{path}: is required and has no value"
    if kind in {"dataclass_type", "dict_type"}:
        return f"{path}: {value!r} is not a section; write its fields below it"
    if kind == "literal_error":
        return f"{path}: {value!r} is not one of {problem['ctx']['expected']}{_suggest_value(value, problem)}"
    if kind == "tuple_type":
        remedy = f"; write [{value}]" if isinstance(value, str) else ""
        return f"{path}: {value!r} is not a list{remedy}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{path}: {value!r}: {message}"


def _suggest_value(value: Any, problem: Mapping[str, Any]) -> str:
    choices = [choice.strip("' ") for choice in problem["ctx"]["expected"].replace(" or ", ",").split(",")]
    near = difflib.get_close_matches(str(value), choices, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _suggest(path: str) -> str:
    """The nearest valid name: a similar one here, the same or a longer one elsewhere, a similar path."""
    known = list(_field_paths(Config, ""))
    section, _, name = path.rpartition(".")
    name = name.replace("-", "_")
    elsewhere = [p for p in known if p.rpartition(".")[2] == name]
    siblings = {p.rpartition(".")[2]: p for p in known if p.rpartition(".")[0] == section}
    near = difflib.get_close_matches(name, siblings, n=1)
    if near:
        return f"; did you mean {siblings[near[0]]}?"
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    longer = [p for p in known if name in p.rpartition(".")[2].split("_")]
    if longer:
        return f"; did you mean {longer[0]}?"
    anywhere = difflib.get_close_matches(path, [p for p in known if p != section], n=1, cutoff=0.5)
    if anywhere:
        return f"; did you mean {anywhere[0]}?"
    return f"; the fields here are {', '.join(siblings)}"


def _field_paths(node: Any, prefix: str) -> Iterator[str]:
    for item in fields(node):
        path = prefix + item.name
        yield path
        for section in _find_sections(item.type):
            yield from _field_paths(section, path + ".")


def _find_sections(kind: Any) -> Iterator[Any]:
    """The configuration classes that a field's type is made of."""
    if is_dataclass(kind):
        yield kind
    else:
        for part in get_args(kind):
            yield from _find_sections(part)


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _listify(value: Any) -> Any:
    """Tuples as lists, which YAML can say."""
    if isinstance(value, dict):
        return {name: _listify(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_listify(child) for child in value]
    return value
