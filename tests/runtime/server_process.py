"""A server in a process of its own, for scripts that attack or load it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx


class ServerProcess:
    """``castiron serve-engine`` on a free port; what it logs is kept."""

    def __init__(self, engine: str, *options: str) -> None:
        command = [sys.executable, "-m", "castiron", "serve-engine", engine, "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        threading.Thread(target=self._read_log, daemon=True).start()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"(http://127\.0\.0\.1:(\d+))/v1", line):
                self.url, self.port = found[1], int(found[2])
                threading.Thread(target=self.process.stdout.read, daemon=True).start()
                return
        raise SystemExit(f"the server did not start: {''.join(self.log)}")

    def rss_mib(self) -> float:
        """Memory of the process that is in use."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def open_files(self) -> int:
        """Files and sockets that the process holds."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def gauges(self) -> dict[str, float]:
        """Values of /metrics without labels, by their names behind ``castiron:``."""
        lines = httpx.get(self.url + "/metrics", timeout=30).text.splitlines()
        return {
            line.split("{")[0].removeprefix("castiron:"): float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith("castiron:") and "le=" not in line
        }

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)


@contextmanager
def running(engine: str, *options: str) -> Iterator[ServerProcess]:
    """A server that ends, by SIGTERM and with exit code 0, when the context does."""
    server = ServerProcess(engine, *options)
    try:
        yield server
        server.process.terminate()
        code = server.process.wait(60)
        if code:
            raise SystemExit(f"the server ended with {code}: {''.join(server.log[-50:])}")
    finally:
        server.process.kill()


def report(failures: list[Any], what: str) -> None:
    """End the script: exit code 1 where anything failed."""
    for failure in failures[:20]:
        print("FAILED:", failure)
    print(f"{what}: {len(failures)} failures")
    raise SystemExit(1 if failures else 0)
