"""Scorers: what an answer is worth.

A built-in scorer is a function of (response, label) and a line in `SCORERS`. Anybody's own is `pkg.mod:fn`, called as
fn(response: str, label, sample: dict), where `sample` is the dataset's row; it gives a number, a bool, or None for "no
score". Its module is looked for where Python looks, then beside the suite, then in the working directory.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from evalkit.ground.errors import DataError

REGEX_TIMEOUT = 10.0  # seconds of the processor for one search; some patterns would need years

Score = float | int | bool | None
ScoreFunction = Callable[[str, Any, dict[str, Any]], Score]

_NUMBER = re.compile(r"(?:(?<![\d.])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Scorer:
    """A scorer ready for use.

    Attributes:
        check_label: raises ValueError for a label that it cannot use; None: any label will do, a missing one too.
        aside: called in a thread of its own, since it may block or never return.
    """

    name: str
    score: ScoreFunction
    check_label: Callable[[Any], object] | None = None
    aside: bool = False


def exact(response: str, label: Any) -> bool:
    """The response is the label, white space at both ends aside."""
    return response.strip() == _plain(label).strip()


def numeric(response: str, label: Any) -> bool:
    """The last number in the response equals the label: 1,000 and 1e3 and 1000.0 are the same."""
    found = [match.group() for match in _NUMBER.finditer(response)]
    wanted = _decimal(label)
    try:
        return bool(found) and _decimal(found[-1]) == wanted
    except ValueError:  # no number that a Decimal can hold
        return False


def regex(response: str, label: Any) -> bool:
    """The label, a regular expression, is found in the response."""
    import regex as patterns  # has a timeout, and lets other threads run

    try:
        return patterns.search(label, response, timeout=REGEX_TIMEOUT) is not None
    except TimeoutError:
        raise TimeoutError(f"the search for {label!r} took more than {REGEX_TIMEOUT:g} s") from None


def _plain(label: Any) -> str:
    if not isinstance(label, str | int | float) or isinstance(label, bool):
        raise ValueError(f"must be a text or a number, not {label!r}")
    return str(label)


def _decimal(label: Any) -> Decimal:
    try:
        value = Decimal(_plain(label).strip().replace(",", ""))
    except InvalidOperation:
        raise ValueError(f"must be a number, not {label!r}") from None
    if not value.is_finite():
        raise ValueError(f"must be a number, not {label!r}")
    return value


def _pattern(label: Any) -> object:
    import regex as patterns

    try:
        return patterns.compile(label)
    except (patterns.error, TypeError) as error:
        raise ValueError(f"must be a regular expression, not {label!r}: {error}") from None


def _built_in(
    name: str, score: Callable[[str, Any], bool], check_label: Callable[[Any], object], *, aside: bool = False
) -> Scorer:
    return Scorer(name, lambda response, label, sample: score(response, label), check_label, aside)


SCORERS = {
    "exact": _built_in("exact", exact, _plain),
    "numeric": _built_in("numeric", numeric, _decimal),
    "regex": _built_in("regex", regex, _pattern, aside=True),
}


def check_name(name: str) -> None:
    """Raises ValueError when `name` neither is a scorer's nor has the form `pkg.mod:fn`."""
    if name not in SCORERS and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        raise ValueError(f"must be one of {', '.join(SCORERS)}, or a function pkg.mod:fn, not {name!r}")


def find_scorer(name: str, directory: Path) -> Scorer:
    """The scorer called `name`; `directory` is the suite's.

    Raises:
        DataError: its module cannot be imported or has no such function.
    """
    if name in SCORERS:
        return SCORERS[name]
    module_name, _, attribute = name.partition(":")
    # Behind everything else, so that no file there takes the place of an installed module.
    for place in (str(directory), str(Path.cwd())):
        if place not in sys.path:
            sys.path.append(place)
    try:
        function = getattr(importlib.import_module(module_name), attribute, None)
    except (Exception, SystemExit) as error:  # somebody's module may fail in any way, or end as a script does
        problem = f"{type(error).__name__}: {error}"
        raise DataError(f"the scorer {name} cannot be imported: {problem}", reason="incomplete") from error
    if not callable(function):
        raise DataError(f"the scorer {name}: {module_name} has no function {attribute}", reason="incomplete")
    return Scorer(name, function, aside=True)


def as_score(value: Any) -> float | None:
    """What a scorer returned as a number, None for "no score".

    Raises:
        ValueError: it is nothing of that kind.
    """
    if value is None:
        return None
    try:
        score = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"the scorer returned {value!r}, not a number") from None
    if not math.isfinite(score):
        raise ValueError(f"the scorer returned {value!r}, not a finite number")
    return score
