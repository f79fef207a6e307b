"""The report: a table of hooks and checks, one line for each failure, and a file to attach to a bug report."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from ..bench.report import read_json, write_json
from .case import FAIL, MEASURED, NOT_APPLICABLE, NOT_RUN, Outcome


@dataclass
class Report:
    """Grows while the checks run."""

    hooks: list[str]
    checks: list[str]
    about: dict[str, Any] = field(default_factory=dict)
    results: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    running: str | None = None
    """The check under way, by name and hook."""
    stopped: str | None = None
    """Why the checks that were not run were not."""
    seconds: float = 0.0

    def add(self, hook: str, check: str, outcome: Outcome, seconds: float) -> None:
        result = {"status": outcome.status, "text": outcome.text, "seconds": round(seconds, 3), **outcome.figures}
        self.results[hook, check] = result

    def status(self, hook: str, check: str) -> str:
        return self.results[hook, check]["status"] if (hook, check) in self.results else NOT_RUN

    @property
    def failures(self) -> list[str]:
        """One line for each check that failed."""
        return [
            f"{hook}, {check}: {result['text']}"
            for (hook, check), result in self.results.items()
            if result["status"] == FAIL
        ]

    @property
    def passed(self) -> bool:
        return self.stopped is None and not self.failures

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "running": self.running,
            "stopped": self.stopped,
            **self.about,
            "hooks": {
                hook: {check: self.results.get((hook, check), {"status": NOT_RUN}) for check in self.checks}
                for hook in self.hooks
            },
        }

    def write(self, path: str | os.PathLike) -> None:
        write_json(path, self.to_dict())

    def _cell(self, hook: str, check: str) -> str:
        status = self.status(hook, check)
        return self.results[hook, check]["text"] if status == MEASURED else status

    def table(self) -> str:
        rows = [["hook", *self.checks], *([hook, *(self._cell(hook, c) for c in self.checks)] for hook in self.hooks)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def text(self) -> str:
        """What the command prints."""
        lines = [self._heading(), "", self.table()]
        notes = [
            f"{check}: {reasons.pop()}"
            for check in self.checks
            if len(reasons := {r["text"] for (_, c), r in self.results.items() if c == check}) == 1
            and all(self.status(hook, check) == NOT_APPLICABLE for hook in self.hooks)
        ]
        lines += ["", *notes] if notes else []
        lines += ["", *(f"FAIL  {failure}" for failure in self.failures)] if self.failures else []
        if self.stopped is not None:
            lines += ["", f"stopped: {self.stopped}; the remaining checks were not run"]
        counts = [result["status"] for result in self.results.values()]
        applied = len(counts) - counts.count(NOT_APPLICABLE)
        lines += ["", f"{applied - counts.count(FAIL)} of {applied} checks passed, in {self.seconds:.0f} s"]
        return "\n".join(lines)

    def _heading(self) -> str:
        if not self.about:
            return "the surroundings could not be described"
        about, link = self.about, self.about["link"]
        nodes = f"{about['nodes']} node{'s' if about['nodes'] > 1 else ''}"
        return (
            f"{about['ranks']} ranks on {nodes}, {about['backend']} on {about['device']} ({about['machines'][0]}), torch "
            f"{about['versions']['torch']}; an all-reduce of {link['all_reduce_mb']:.0f} MB at {link['mb_per_s']:.0f} MB/s, "
            f"latency {1e3 * link['latency_s']:.2f} ms"
        )


def record_death(path: str | os.PathLike) -> str | None:
    """Rank 0 is gone, and has left the report as it was when a check began: that check failed. Returns a line that says so."""
    if not os.path.exists(path):
        return None
    report = read_json(path, "report", "`accel-commhooks verify` writes one")
    running = report.get("running")
    if not running:
        return None
    text = f"ranks must live through a check, but rank 0 ended in '{running}'; its own last words are above"
    check, _, hook = running.partition(" of ")
    if hook in report["hooks"]:
        report["hooks"][hook][check] = {"status": FAIL, "text": text}
    report |= {"passed": False, "running": None, "stopped": text}
    write_json(path, report)
    return f"FAIL  {hook}, {check}: {text}"
