"""What the launcher tells the agent, through the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from evalkit.ground.errors import UsageError

KEY_FILE = "EVALKIT_ENGINE_KEY_FILE"
ENGINE_ID = "EVALKIT_ENGINE_ID"
EPOCH = "EVALKIT_ENGINE_EPOCH"


@dataclass(frozen=True)
class Settings:
    """Who this engine is.

    Attributes:
        key: the fleet's secret; it comes from a file, so that it stands in no environment and no command line.
        engine_id: the launcher's name of this engine.
        epoch: the least epoch; only a higher one pins.
    """

    key: bytes = field(repr=False)
    engine_id: str
    epoch: int


def read_settings() -> Settings:
    """Read the settings of this process.

    Raises:
        UsageError: a variable is missing or wrong, or the key file cannot be read or is empty.
    """
    return Settings(_read_key(_required(KEY_FILE)), _required(ENGINE_ID), _epoch(os.environ.get(EPOCH, "0")))


def _required(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise UsageError(f"{name} is not set", "start engines with evalkit fleet up")
    return value


def _read_key(path: str) -> bytes:
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise UsageError(f"the key file {path} ({KEY_FILE}) cannot be read: {error.strerror}") from error
    if not key:
        raise UsageError(f"the key file {path} ({KEY_FILE}) is empty")
    return key


def _epoch(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{EPOCH} is {text!r}, not a whole number")
    return int(text)
