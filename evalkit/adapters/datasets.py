"""Datasets: JSONL, one prompt a line, read as a stream so that memory does not grow with the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from evalkit.adapters.scorers import Scorer
from evalkit.adapters.suite import Dataset
from evalkit.ground.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt.

    Attributes:
        index: position among the dataset's prompts, from 0.
        prompt: a text, or the messages of a chat.
        sample: the whole row, `metadata` included, for the scorer.
    """

    index: int
    prompt: str | list[dict[str, Any]]
    label: Any
    tools: list[Any] | None
    sample: dict[str, Any]


def read_rows(dataset: Dataset, scorer: Scorer) -> Iterator[Row]:
    """The dataset's rows in order; blank lines are no rows.

    Raises:
        DataError: a row that cannot be used, naming file, line and field.
    """
    with dataset.path.open("rb") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for index, (number, line) in enumerate(islice(lines, dataset.limit)):
            try:
                yield _row(dataset, scorer, index, line)
            except ValueError as error:
                raise DataError(f"{dataset.path}:{number}: {error}", reason="incomplete") from None


def count_rows(dataset: Dataset, scorer: Scorer) -> int:
    """Check every row and count them.

    Raises:
        DataError: as `read_rows`, or there is none.
    """
    count = sum(1 for _ in read_rows(dataset, scorer))
    if not count:
        raise DataError(f"{dataset.path} has no rows", reason="incomplete")
    return count


def _row(dataset: Dataset, scorer: Scorer, index: int, line: bytes) -> Row:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError("a row must be a JSON object")
    if dataset.input_key not in row:
        raise ValueError(f"there is no {dataset.input_key!r} (input_key); the row has {', '.join(row) or 'nothing'}")
    prompt = _prompt(dataset.input_key, row[dataset.input_key])
    label = _label(dataset, scorer, row)
    return Row(index, prompt, label, _tools(dataset, row, prompt), _sample(dataset, row))


def _prompt(key: str, prompt: Any) -> str | list[dict[str, Any]]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt):
        return prompt
    raise ValueError(f"{key!r} must be a text or a list of chat messages, each with a role")


def _label(dataset: Dataset, scorer: Scorer, row: dict[str, Any]) -> Any:
    key = dataset.label_key or "label"
    if key not in row:
        if dataset.label_key is None and scorer.check_label is None:
            return None
        raise ValueError(f"there is no {key!r} (label_key); the row has {', '.join(row)}")
    if scorer.check_label is not None:
        try:
            scorer.check_label(row[key])
        except ValueError as error:
            raise ValueError(f"{key!r} {error}") from None
    return row[key]


def _tools(dataset: Dataset, row: dict[str, Any], prompt: object) -> list[Any] | None:
    tools = row.get(dataset.tool_key) if dataset.tool_key else None
    if tools is None:
        return None
    if not isinstance(tools, list) or isinstance(prompt, str):
        raise ValueError(f"{dataset.tool_key!r} must be a list of tools, beside a prompt of chat messages")
    return tools


def _sample(dataset: Dataset, row: dict[str, Any]) -> dict[str, Any]:
    if dataset.metadata_key is None and not dataset.metadata_overrides:
        return row
    own = (row.get(dataset.metadata_key) if dataset.metadata_key else None) or {}
    if not isinstance(own, dict):
        raise ValueError(f"{dataset.metadata_key!r} must be a mapping")
    return {**row, "metadata": {**own, **dataset.metadata_overrides}}
