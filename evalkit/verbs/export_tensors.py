"""`evalkit.export_snapshot`: a trainer in Python hands its tensors over."""

from __future__ import annotations


def export_snapshot() -> None: ...
