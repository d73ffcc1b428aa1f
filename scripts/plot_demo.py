"""Show how an evaluated training went: `plot_demo.py METRICS.jsonl WAITS`.

WAITS has a line for each point that was due: its step, and the microseconds that the trainer waited for its dispatch.
Ends with 1 when a point was lost, or when the accuracy did not rise from below 0.5 to 0.9 and more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SCORE, LAG = "eval/addition", "eval/lag_steps"
HEIGHT = 10  # rows of the plot
COLUMN = 6  # characters a point


def main(metrics: Path, waits: Path) -> int:
    waited = {int(step): int(micros) / 1e6 for step, micros in map(str.split, waits.read_text().splitlines())}
    rows = {row["step"]: row for row in map(json.loads, metrics.read_text().splitlines())}
    console = Console(highlight=False)
    console.print(table(waited, rows))
    scores = {step: row["metrics"][SCORE] for step, row in sorted(rows.items()) if SCORE in row["metrics"]}
    console.print("\n".join(plot(list(waited), scores)), markup=False, soft_wrap=True)
    skipped = [row for row in rows.values() if row["outcome"] == "skipped"]
    console.print(
        f"\n{len(waited)} points due, {len(scores)} landed, {len(skipped)} skipped; "
        f"the trainer waited {sum(waited.values()):.1f} s in all, {max(waited.values()):.1f} s at most",
        soft_wrap=True,
    )
    problem = verdict(waited, rows, scores)
    if problem:
        print(f"demo failed: {problem}", file=sys.stderr)
    return 1 if problem else 0


def table(waited: dict[int, float], rows: dict[int, dict[str, Any]]) -> Table:
    made = Table("step", "outcome", "accuracy", "lag in steps", "trainer waited", title="Addition, held-out sums")
    for column in made.columns[2:]:
        column.justify = "right"
    for step, seconds in waited.items():
        row = rows.get(step, {"outcome": "lost", "metrics": {}})
        outcome = " ".join(filter(None, [row["outcome"], row.get("reason")]))
        score, lag = row["metrics"].get(SCORE), row["metrics"].get(LAG)
        made.add_row(
            str(step),
            outcome,
            "" if score is None else f"{score:.3f}",
            "" if lag is None else f"{lag:.0f}",
            f"{seconds:.2f} s",
        )
    return made


def plot(steps: list[int], scores: dict[int, float]) -> list[str]:
    """Accuracy by step; a step without a score has a blank column."""
    lines = []
    for level in range(HEIGHT, -1, -1):
        marks = ("●" if step in scores and round(scores[step] * HEIGHT) == level else " " for step in steps)
        lines.append(f"{level / HEIGHT:4.1f} ┤" + "".join(mark.center(COLUMN) for mark in marks))
    return [
        *lines,
        "     └" + "─" * COLUMN * len(steps),
        "step  " + "".join(str(step).center(COLUMN) for step in steps),
    ]


def verdict(waited: dict[int, float], rows: dict[int, Any], scores: dict[int, float]) -> str | None:
    """What is wrong with the run, or None."""
    if lost := sorted(waited.keys() - rows.keys()):
        return f"lost without an outcome: steps {lost}"
    if not scores or max(waited) not in scores:
        return f"no score for the final step {max(waited)}"
    first, last = scores[min(scores)], scores[max(scores)]
    return None if first <= 0.5 and last >= 0.9 else f"accuracy went from {first:.3f} to {last:.3f}, not up to 0.9"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
