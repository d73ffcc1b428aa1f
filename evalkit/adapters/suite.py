"""A suite: which datasets to ask, how to sample, how to score. YAML with `eval.defaults` and `eval.datasets`.

    eval:
      defaults: {temperature: 0.0, max_response_len: 256}
      datasets:
        - {name: addition, path: addition.jsonl, rm_type: exact}

Paths are relative to the suite's file. Every mistake is reported with file, line and field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.constructor import SafeConstructor

from evalkit.adapters.scorers import check_name
from evalkit.ground.errors import DataError, UsageError


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One dataset of a suite, under the names that the YAML has.

    Attributes:
        path: JSONL, one prompt a line.
        rm_type: the scorer: a name that evalkit knows, or `pkg.mod:fn`.
        label_key: None: `label`, which may then be missing where the scorer needs none.
        tool_key: field of a row with the tools of a chat prompt.
        metadata_key: field of a row with a mapping for the scorer, given to it as `metadata`.
        metadata_overrides: laid over that mapping.
        n_samples_per_eval_prompt: answers per prompt, with the seeds `seed`, `seed + 1`, ...
        top_k: -1 for all tokens.
        max_response_len: tokens.
        limit: ask only so many prompts, the first ones.
    """

    name: str
    path: Path
    rm_type: str
    input_key: str = "input"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    metadata_overrides: Mapping[str, Any] = field(default_factory=dict)
    n_samples_per_eval_prompt: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_response_len: int = 256
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0
    limit: int | None = None


@dataclass(frozen=True)
class Suite:
    path: Path
    datasets: tuple[Dataset, ...]


def load_suite(path: Path) -> Suite:
    """Read a suite; the datasets' rows are not looked at yet.

    Raises:
        UsageError: there is no such file.
        DataError: it is no suite, naming file, line and field.
    """
    path = path.absolute()
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise UsageError(f"there is no suite {path}", "give one with --suite FILE") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason} at byte {error.start}", reason="incomplete") from None
    return _SuiteReader(path).read(text)


_Check = Callable[[Any], Any]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a text, not {value!r}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) and item for item in values):
        raise ValueError(f"must be a text or a list of texts, not {value!r}")
    return tuple(values)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"must be a mapping, not {value!r}")
    return value


def _number(accept: Callable[[float], bool], wanted: str, whole: bool = False) -> _Check:
    def check(value: Any) -> Any:
        kinds = (int,) if whole else (int, float)
        # A bool is an int in Python, and `1e-3` a text in YAML 1.1.
        if isinstance(value, bool) or not isinstance(value, kinds) or not accept(value):
            hint = " (YAML wants 1.0e-3)" if isinstance(value, str) and re.fullmatch(r"\d+e-?\d+", value) else ""
            raise ValueError(f"must be {wanted}, not {value!r}{hint}")
        return value if whole else float(value)

    return check


def _name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", value):
        raise ValueError(f"must be of letters, digits, '.', '_' and '-', not {value!r}")
    return value


def _scorer(value: Any) -> str:
    check_name(_text(value))
    return str(value)


_COUNT = _number(lambda n: n >= 1, "a whole number of 1 or more", whole=True)

_CHECKS: dict[str, _Check] = {
    "name": _name,
    "path": _text,
    "rm_type": _scorer,
    "input_key": _text,
    "label_key": _text,
    "tool_key": _text,
    "metadata_key": _text,
    "metadata_overrides": _mapping,
    "n_samples_per_eval_prompt": _COUNT,
    "temperature": _number(lambda x: 0 <= x < float("inf"), "a number of 0 or more"),
    "top_p": _number(lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "top_k": _number(lambda n: n >= -1, "a whole number of -1 (all) or more", whole=True),
    "max_response_len": _COUNT,
    "min_new_tokens": _number(lambda n: n >= 0, "a whole number of 0 or more", whole=True),
    "stop": _texts,
    "seed": _number(lambda n: n >= 0, "a whole number of 0 or more", whole=True),
    "limit": _COUNT,
}
_REQUIRED = ("name", "path", "rm_type")
_OWN = ("name", "path")  # fields that no default can give


class _SuiteReader:
    """Reads one suite file; every message names the file and the line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, node: yaml.Node, problem: str, remedy: str = "") -> NoReturn:
        raise DataError(f"{self.path}:{node.start_mark.line + 1}: {problem}", remedy, reason="incomplete")

    def read(self, text: str) -> Suite:
        try:
            root = yaml.compose(text, yaml.SafeLoader)
        except yaml.YAMLError as error:
            raise DataError(f"{self.path} is not YAML: {_where(error)}", reason="incomplete") from error
        if root is None:
            raise DataError(f"{self.path} is empty", "it must have eval.datasets", reason="incomplete")
        top = self.entries(root, "the suite", ("eval",))
        if "eval" not in top:
            self.fail(root, "eval is missing", "a suite has eval.defaults and eval.datasets")
        body = self.entries(top["eval"], "eval", ("defaults", "datasets"))
        defaults = self.values(body["defaults"], "eval.defaults", _OWN) if "defaults" in body else {}
        if "datasets" not in body:
            self.fail(top["eval"], "eval.datasets is missing")
        return Suite(self.path, self.datasets(body["datasets"], defaults))

    def datasets(self, node: yaml.Node, defaults: dict[str, Any]) -> tuple[Dataset, ...]:
        if isinstance(node, yaml.SequenceNode):
            named: list[tuple[str | None, yaml.Node]] = [(None, item) for item in node.value]
        elif isinstance(node, yaml.MappingNode):
            named = list(self.entries(node, "eval.datasets", None).items())
        else:
            self.fail(node, "eval.datasets must be a list, or a mapping by name")
        if not named:
            self.fail(node, "eval.datasets names no dataset")
        found: dict[str, Dataset] = {}
        for position, (name, item) in enumerate(named):
            dataset = self.dataset(item, f"eval.datasets[{name or position}]", name, defaults)
            if dataset.name in found:
                self.fail(item, f"eval.datasets names {dataset.name} twice")
            found[dataset.name] = dataset
        return tuple(found.values())

    def dataset(self, node: yaml.Node, where: str, name: str | None, defaults: dict[str, Any]) -> Dataset:
        own = self.values(node, where, ())
        if name is not None and own.setdefault("name", name) != name:
            self.fail(node, f"{where}.name is {own['name']}, the mapping's key {name}")
        values = {**defaults, **own}
        for required in _REQUIRED:
            if required not in values:
                self.fail(node, f"{where}.{required} is missing")
        self.check(node, f"{where}.name", _name, values["name"])
        values["path"] = self.path.parent / Path(values["path"]).expanduser()
        if not values["path"].is_file():
            self.fail(node, f"{where}.path: there is no file {values['path']}")
        dataset = Dataset(**values)
        if dataset.min_new_tokens > dataset.max_response_len:
            self.fail(node, f"{where}.min_new_tokens is above max_response_len ({dataset.max_response_len})")
        return dataset

    def values(self, node: yaml.Node, where: str, refused: tuple[str, ...]) -> dict[str, Any]:
        """The checked fields of a mapping; a null one counts as not given."""
        known = tuple(f.name for f in fields(Dataset) if f.name not in refused)
        values = {}
        for key, item in self.entries(node, where, known).items():
            value = SafeConstructor().construct_document(item)
            if value is not None:
                values[key] = self.check(item, f"{where}.{key}", _CHECKS[key], value)
        return values

    def check(self, node: yaml.Node, where: str, check: _Check, value: Any) -> Any:
        try:
            return check(value)
        except ValueError as error:
            self.fail(node, f"{where} {error}")

    def entries(self, node: yaml.Node, where: str, known: tuple[str, ...] | None) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            self.fail(node, f"{where} must be a mapping")
        own = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        SafeConstructor().flatten_mapping(node)  # what `<<` merges in comes first, so that the mapping's own wins
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = str(key.value)
            if known is not None and name not in known:
                self.fail(key, f"{where} has the unknown field {name!r}", f"known are {', '.join(known)}")
            if own.count(key.value) > 1:
                self.fail(key, f"{where} has {name!r} twice")
            found[name] = value
        return found


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}: {problem}" if mark else problem
