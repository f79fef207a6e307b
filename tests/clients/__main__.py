"""Run every client with every hook and write the table: ``make clients``, or ``cd tests; python -m clients PAGE``."""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from .clients import CLIENTS, HOOKS, Client, judge, start, why_not

BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"
PACKAGES = {"sentence_transformers": "sentence-transformers"}


def cells(client: Client, folder: Path) -> list[str]:
    if not client.installed:
        return ["not installed"] * len(HOOKS)
    plain = start(client, None, folder / "plain")
    found = []
    for hook in HOOKS:
        if (reason := why_not(client, hook)) is not None:
            found.append(reason)
            continue
        try:
            found.append(judge(client, hook, plain, start(client, hook, folder / hook)))
        except AssertionError as error:
            print(f"{client.command} {hook}: {str(error)[-3000:]}", file=sys.stderr, flush=True)
            found.append("**fails**")
    return found


def main(page: Path, wanted: list[str]) -> int:
    lines = [f"| client | {' | '.join(f'`{hook}`' for hook in HOOKS)} |", "|---" * (len(HOOKS) + 1) + "|"]
    for name, client in CLIENTS.items():
        if wanted and not any(part in name for part in wanted):
            continue
        with tempfile.TemporaryDirectory() as folder:
            lines.append(f"| {name} | {' | '.join(cells(client, Path(folder)))} |")
        print(lines[-1], flush=True)
    packages = sorted({PACKAGES.get(client.package, client.package) for client in CLIENTS.values() if client.installed})
    lines += ["", "Run with " + ", ".join(f"{package} {version(package)}" for package in ["torch", *packages]) + "."]
    if not wanted:
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(before + "\n".join([BEGIN, *lines, END]) + rest.partition(END)[2])
    return any("**fails**" in line for line in lines)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
