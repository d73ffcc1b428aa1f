"""What a failure is called in an eval point, where the error alone does not say it."""

from __future__ import annotations

from evalkit.ground.errors import FULL, BusyError, DataError, EvalkitError, UsageError


def of_export(error: EvalkitError | OSError) -> str:
    """The reason of a point whose export failed.

    A source that is not there is `ckpt_missing`; one that is damaged, or must not take the place of what is there,
    has failed to be exported.
    """
    if isinstance(error, OSError):
        return of_storage(error, "export_failed")
    if isinstance(error, DataError | UsageError | BusyError):
        return "export_failed"
    return error.skip_reason


def of_storage(error: OSError, otherwise: str) -> str:
    return "no_space" if error.errno in FULL else otherwise
