"""Hundreds of streams with clients that leave, for minutes: ``python tests/runtime/soak.py ENGINE``.

Every stream that is read to its end must be whole, /health/ready must say 200 all the time, and at the end no
request may run or wait, and no KV block be held.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field

import httpx
from server_calls import raw_post
from server_process import ServerProcess, report, running


@dataclass
class Soak:
    """What came of it so far."""

    server: ServerProcess
    disconnects: float
    max_tokens: int
    until: float
    rng: random.Random
    whole: int = 0
    left: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)

    async def client(self) -> None:
        """One stream after the other."""
        while time.monotonic() < self.until:
            try:
                await self.stream()
            except OSError as e:
                self.failures.append(f"connection: {e!r}")

    async def stream(self) -> None:
        """One request, read to its end or left at a random event."""
        rng = self.rng
        tokens = rng.randint(1, self.max_tokens)
        leaves = rng.random() < self.disconnects
        last = rng.randint(0, tokens) if leaves else -1
        stream = rng.random() < 0.8
        body = {
            "prompt": f"Story {rng.randrange(50)}: " + "once upon a time " * rng.randint(1, 20),
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
            "return_token_ids": True,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            "n": rng.choice((1, 1, 1, 2)),
        }
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=1 << 20)
        try:
            writer.write(raw_post("/v1/completions", body, "Connection: close"))
            await writer.drain()
            if leaves and not stream:
                await asyncio.sleep(rng.random())
                self.left += 1
                return
            events, answer = 0, b""
            while part := await asyncio.wait_for(reader.read(1 << 16), 120):
                answer += part
                events += part.count(b"data: ")
                if leaves and events > last:
                    self.left += 1
                    return
            self.check(answer, tokens, body["n"], stream)
        finally:
            writer.close()

    def check(self, answer: bytes, tokens: int, n: int, stream: bool) -> None:
        """A whole answer, or one of the refusals that are right."""
        status = int(answer[9:12])
        if status in (429, 503):
            self.refused += 1
            return
        good = b'"completion_tokens":%d,' % (tokens * n) in answer.replace(b'": ', b'":')
        if status != 200 or not good or (stream and b"data: [DONE]" not in answer):
            self.failures.append(f"status {status}, {tokens} x {n} tokens: {answer[-300:]!r}")
        self.whole += 1

    async def watch(self) -> None:
        """Ask for readiness each second."""
        async with httpx.AsyncClient(timeout=30) as client:
            while time.monotonic() < self.until:
                answer = await client.get(self.server.url + "/health/ready")
                if answer.status_code != 200:
                    self.failures.append(f"not ready: {answer.text}")
                await asyncio.sleep(1)


async def _run(soak: Soak, streams: int) -> None:
    await asyncio.gather(soak.watch(), *(soak.client() for _ in range(streams)))


def main() -> None:
    """Load, and exit with 1 where anything was lost or left behind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--disconnects", type=float, default=0.2, help="part of the clients that leave")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    with running(given.engine, "--disable-access-log") as server:
        until = time.monotonic() + given.minutes * 60
        soak = Soak(server, given.disconnects, given.max_tokens, until, random.Random(given.seed))
        asyncio.run(_run(soak, given.streams))
        deadline = time.monotonic() + 10
        while (gauges := server.gauges())["num_requests_running"] and time.monotonic() < deadline:
            time.sleep(0.2)
        for name in ("num_requests_running", "num_requests_waiting", "kv_blocks_used"):
            if gauges[name]:
                soak.failures.append(f"{name} is {gauges[name]} at the end")
        if gauges["kv_blocks_free"] + gauges["kv_blocks_cached"] != gauges["kv_blocks_total"]:
            soak.failures.append(f"blocks are missing: {gauges}")
        if httpx.get(server.url + "/health/ready").json()["unfinished_requests"]:
            soak.failures.append("requests are left in the session")
        print(f"{server.rss_mib():.0f} MiB at the end")
    report(
        soak.failures,
        f"{soak.whole} whole answers, {soak.left} left by their clients, {soak.refused} refused",
    )


if __name__ == "__main__":
    main()
