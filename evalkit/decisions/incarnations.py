"""Which life of the trainer a step belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def name_from_environment(environment: Mapping[str, str]) -> str | None:
    """The trainer's life as Slurm counts it: job id and restart count; None outside of a job."""
    job = environment.get("SLURM_JOB_ID")
    return f"{job}.{environment.get('SLURM_RESTART_COUNT') or '0'}" if job else None


def choose(name: str | None, known: Sequence[str], earlier: Sequence[str], digest: str | None) -> int:
    """The ordinal (from 1) of the incarnation; one more than there are known when a new one begins.

    Args:
        name: as given or taken from the environment. Without one the newest life goes on, until a step comes again
            with other weights.
        known: names by ordinal.
        earlier: digests of this step's attempts in the newest life.
        digest: of the source; None where the step has no earlier attempt.
    """
    if name is not None:
        return list(known).index(name) + 1 if name in known else len(known) + 1
    again = digest is not None and any(other != digest for other in earlier)
    return max(len(known), 1) + (1 if again else 0)
