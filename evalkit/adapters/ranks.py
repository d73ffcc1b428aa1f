"""One writer among a trainer's distributed ranks: all of them go through the same steps, and fail together.

The other ranks take part because the iterators may hold collectives, and because a rank that went on alone would
wait for the writer until the trainer's own time-out. After every step the ranks agree over gloo, which works beside
whatever backend the trainer uses, and notices at once when a rank is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar, cast

from evalkit.ground import errors
from evalkit.ground.errors import EvalkitError, ExportError

T = TypeVar("T")

STEP_TIMEOUT = timedelta(hours=2)  # the longest that a rank may take between two agreements, a shard's writing included
TELL_TIMEOUT = timedelta(seconds=5)

_DONE, _MORE, _FAILED = 0, 1, 2


class PeerFailure(Exception):  # noqa: N818  (carries the error that is to be raised)
    """Another rank failed; `error` is what it met."""

    def __init__(self, error: EvalkitError) -> None:
        super().__init__(str(error))
        self.error = error


class Ranks(AbstractContextManager["Ranks"], Protocol):
    """The ranks of one export."""

    is_writer: bool

    def together(self, chunks: Iterable[T]) -> Iterator[T]:
        """This rank's chunks, in step with the other ranks' until all are at their end.

        Raises:
            PeerFailure: another rank failed.
        """

    def share(self, make: Callable[[], T]) -> T:
        """The writer's result of `make`, on every rank; a failure becomes every rank's.

        Raises:
            EvalkitError: `make`, or another rank, failed.
        """


def join_ranks() -> Ranks:
    """All ranks of the trainer's default process group, if it has one with several."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return _Alone()
    return _Together(distributed) if distributed.get_world_size() > 1 else _Alone()


class _Alone:
    is_writer = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def together(self, chunks: Iterable[T]) -> Iterator[T]:
        return iter(chunks)

    def share(self, make: Callable[[], T]) -> T:
        return make()


class _Together:
    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed
        self._rank: int = distributed.get_rank()
        self.is_writer = self._rank == 0

    def __enter__(self) -> Self:
        self._group = self._distributed.new_group(backend="gloo", timeout=STEP_TIMEOUT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._distributed.destroy_process_group(self._group)

    def together(self, chunks: Iterable[T]) -> Iterator[T]:
        iterator, end = iter(chunks), object()
        self._agree(_MORE)  # whoever failed before this has not touched its iterator, and nobody else may then
        while True:
            chunk = next(iterator, end)
            if chunk is not end:
                yield cast(T, chunk)  # what is done with it ends before the next agreement
            if self._agree(_DONE if chunk is end else _MORE) == _DONE:
                return

    def share(self, make: Callable[[], T]) -> T:
        try:
            result = make()
            self._agree(_DONE)
        except PeerFailure as failure:
            raise failure.error from None
        except BaseException as error:
            self._tell(error)
            raise
        box = [result]
        self._distributed.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _agree(self, state: int) -> int:
        """The highest state of any rank.

        Raises:
            PeerFailure: a rank failed, or is gone.
        """
        import torch

        value = torch.tensor([state])
        try:
            self._distributed.all_reduce(value, op=self._distributed.ReduceOp.MAX, group=self._group)
            if int(value) == _FAILED:
                self._raise_told(None)
        except RuntimeError as error:
            raise PeerFailure(ExportError(f"another rank ended during the export: {error}")) from error
        return int(value)

    def _tell(self, error: BaseException) -> None:
        """Let the others fail with this rank's error, if they listen.

        They don't when they wait for this rank in a collective of the trainer's own, which its error has left: then
        it is for this rank to end, which they notice.
        """
        import torch

        set_timeout = getattr(self._distributed.distributed_c10d, "_set_pg_timeout", None)
        if set_timeout is not None:
            set_timeout(TELL_TIMEOUT, self._group)  # an operation left pending would hold the process at its end
        try:
            self._distributed.all_reduce(torch.tensor([_FAILED]), op=self._distributed.ReduceOp.MAX, group=self._group)
            self._gather(_pack(error, self._rank))
        except RuntimeError:
            pass  # nobody listens; this rank's own error is what counts

    def _raise_told(self, mine: dict[str, str] | None) -> NoReturn:
        told = [item for item in self._gather(mine) if item is not None]
        raise PeerFailure(_unpack(told[0]))

    def _gather(self, mine: dict[str, str] | None) -> list[dict[str, str] | None]:
        answers: list[dict[str, str] | None] = [None] * self._distributed.get_world_size()
        self._distributed.all_gather_object(answers, mine, group=self._group)
        return answers


def _pack(error: BaseException, rank: int) -> dict[str, str]:
    if isinstance(error, EvalkitError):
        return {
            "class": type(error).__name__,
            "message": error.message,
            "remedy": error.remedy,
            "reason": error.skip_reason,
        }
    return {"class": "ExportError", "message": f"rank {rank} failed: {error!r}", "remedy": "", "reason": ""}


def _unpack(packed: dict[str, str]) -> EvalkitError:
    kind: type[EvalkitError] = getattr(errors, packed["class"])
    return kind(packed["message"], packed["remedy"], packed["reason"])
