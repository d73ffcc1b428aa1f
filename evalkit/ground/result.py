"""What a verb gives back: an answer for programs, the same for people, and an exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """A verb's answer.

    Attributes:
        data: the answer as a JSON-ready mapping; `--json` prints it under `result`.
        lines: what stdout shows otherwise, a line each.
        code: the exit code; not 0 only where the verb's help documents it.
        notes: what a person should know beside the answer, a line each; goes to stderr.
    """

    data: Mapping[str, Any]
    lines: Sequence[str] = field(default=())
    code: int = 0
    notes: Sequence[str] = field(default=())
