"""evalkit: evaluate checkpoints while training goes on.

The command line is `evalkit`; the same things are here for a trainer in Python. Names are imported when used, so that
`import evalkit` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evalkit.ground.errors import EvalkitError, EvalSkip
    from evalkit.verbs.export_tensors import export_snapshot

__version__ = "0.1.0"
__all__ = ["EvalSkip", "EvalkitError", "__version__", "export_snapshot"]

_HOMES = {
    "EvalSkip": "evalkit.ground.errors",
    "EvalkitError": "evalkit.ground.errors",
    "export_snapshot": "evalkit.verbs.export_tensors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'evalkit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
