"""Random names."""

from __future__ import annotations

import os


def new_id() -> str:
    """32 random hex digits. The uuid module gives the same, and costs more to import than a file to write."""
    return os.urandom(16).hex()
