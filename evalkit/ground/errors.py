"""Errors that carry their exit code, the skip reason they become in an eval point, and what to do.

An `EvalkitError` is an expected failure: the command line prints it as one line and exits with `code`; a
worker settles its point as a skip with `skip_reason`. Anything else that is raised is a bug.
"""

from __future__ import annotations

import errno
import re
from typing import ClassVar

REASONS = (
    "busy",
    "export_failed",
    "no_space",
    "ckpt_missing",
    "unhealthy",
    "pin_violation",
    "incomplete",
    "crashed",
    "timeout",
    "cancelled",
    "superseded",
)


class EvalkitError(Exception):
    """An expected failure: what is wrong and where, and what to do about it.

    Args:
        message: what is wrong and where (file, field, step), without a full stop.
        remedy: what to do; empty when the message says it.
        reason: the skip reason to use instead of the class's.
    """

    code: ClassVar[int] = 1
    kind: ClassVar[str] = "failed"
    default_reason: ClassVar[str] = "crashed"

    def __init__(self, message: str, remedy: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.skip_reason = reason or self.default_reason

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class UsageError(EvalkitError):
    """Arguments that contradict each other or cannot be meant."""

    code = 2
    kind = "usage"


class DataError(EvalkitError):
    """A file that the caller gave is not what it must be."""

    code = 65
    kind = "bad_data"
    default_reason = "ckpt_missing"


class NoSnapshotError(EvalkitError):
    """A snapshot (or a base model) is not there or not complete."""

    code = 66
    kind = "no_snapshot"
    default_reason = "ckpt_missing"


class UnavailableError(EvalkitError):
    """An engine or a fleet does not answer, or answers that it cannot."""

    code = 69
    kind = "unavailable"
    default_reason = "unhealthy"


class PinViolationError(EvalkitError):
    """An engine holds other weights than the ones asked for."""

    kind = "pin_violation"
    default_reason = "pin_violation"


class IncompleteError(EvalkitError):
    """An evaluation in which too many samples got no answer."""

    kind = "incomplete"
    default_reason = "incomplete"


class ExportError(EvalkitError):
    """An export that failed for another reason than its input or the disk."""

    kind = "export_failed"
    default_reason = "export_failed"


class StorageError(EvalkitError):
    """The disk or the memory is full, or a file cannot be read or written."""

    code = 74
    kind = "io"
    default_reason = "no_space"


class BusyError(EvalkitError):
    """Somebody else holds what is needed; the same command may succeed later."""

    code = 75
    kind = "busy"
    default_reason = "busy"


# The errnos of a write that failed for want of room: the disk, a quota, or a limit on the size of a file.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class EvalSkip(Exception):  # noqa: N818  (a skip is an outcome, not an error)
    """Raised to end an eval point as a skip.

    Args:
        reason: one of `REASONS`, or an evaluator's own, made to fit `[a-z0-9_]+`.
        detail: one line for a person.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = re.sub(r"[^a-z0-9_]+", "_", reason.lower()).strip("_") or "skipped"
        self.detail = detail
