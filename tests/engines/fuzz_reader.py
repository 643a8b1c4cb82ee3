"""Throw damaged and crafted engines at the reader: python tests/engines/fuzz_reader.py [--inputs 100000]
[--seed 0].

Every input must end in an opened engine or in an EngineError. Half of the mutations keep sizes and hashes
consistent, so that the checks behind them are reached. With --core, what the reader accepts also runs on the
C++ runtime, which must refuse it with an EngineError or run it, and never crash. Prints how many inputs were
refused, by kind of mutation.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import hashlib
import io
import json
import random
import resource
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from castiron.engines import Engine, open_engine
from castiron.runtime.options import RuntimeOptions
from castiron.runtime.verify import CoreRunner
from tiny import write_tiny_engine
from tiny_cuda import add_cuda

from castiron.errors import EngineError

FILES = ("config.json", "rank0.engine", "rank0.safetensors")
_NUMBERS = (0, 1, -1, 2, 63, 64, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30, 0.5, 1e308)
_TEXTS = (
    "",
    "T",
    "N",
    "x",
    "host",
    "f32",
    "bf16",
    "plain",
    "../x",
    "/etc/passwd",
    "\0",
    "\ud800",
    "ü" * 300,
    "1.1",
)
_ATOMS: tuple[Any, ...] = (*_NUMBERS, *_TEXTS, None, True, False, [], {}, [[]], [1, 2], {"a": 1})


class Fuzzer:
    """Mutates one engine in place, looks what the reader says, and restores it."""

    def __init__(self, folder: Path, seed: int, core: bool = False) -> None:
        self.core = core
        # A fat engine, unless the core is to run whatever target comes first.
        self.folder = write_tiny_engine(folder / "tiny", more=None if core else add_cuda)
        self.random = random.Random(seed)
        self.original = {name: (self.folder / name).read_bytes() for name in FILES}
        with zipfile.ZipFile(self.folder / "rank0.engine") as archive:
            self.entries = {name: archive.read(name) for name in archive.namelist()}
        self.programs = [name for name in self.entries if name.endswith("/program.json")]
        self.kinds = [
            self.flip_raw,
            self.cut_raw,
            self.splice_raw,
            self.change_manifest,
            self.change_program,
            self.nudge_program,
            self.change_tensor_table,
            self.flip_sealed,
            self.craft_zip,
            self.damage_zip_structure,
            self.change_golden,
        ]
        self.outcomes: Counter[tuple[str, str]] = Counter()

    def run_one(self) -> None:
        """Make one input and check what the reader does with it."""
        kind = self.random.choice(self.kinds)
        changed = kind()
        for name, data in changed.items():
            (self.folder / name).write_bytes(data)
        try:
            outcome = self.use()
        finally:
            for name in changed:
                (self.folder / name).write_bytes(self.original[name])
        self.outcomes[kind.__name__, outcome] += 1

    def use(self) -> str:
        """Open the engine and read everything that a runtime reads; any exception but EngineError escapes."""
        try:
            engine = open_engine(self.folder)
            for target in engine.targets:
                engine.kernel_images(target)
            assert all(offset % 64 == 0 for offset, _ in engine.tensors.values())
            engine.golden()
            engine.graph()
            engine.build_report()
            engine.check_hashes()
            if self.core:
                run_core(engine)
        except EngineError as error:
            # It must be printable, whatever bytes it quotes.
            str(error).encode("utf-8", "backslashreplace")
            return "refused"
        return "opened"

    def flip_raw(self) -> dict[str, bytes]:
        """Flip a few bits of a file."""
        name = self.random.choice(FILES)
        return {name: self.flip(self.original[name])}

    def cut_raw(self) -> dict[str, bytes]:
        """Cut a file short, or make it longer."""
        name = self.random.choice(FILES)
        data = self.original[name]
        if self.random.random() < 0.8:
            return {name: data[: self.random.randrange(len(data))]}
        return {name: data + self.random.randbytes(self.random.randrange(1, 200))}

    def splice_raw(self) -> dict[str, bytes]:
        """Overwrite a run of a file with noise, zeros or a part of another file."""
        name = self.random.choice(FILES)
        return {name: self.splice(self.original[name])}

    def change_manifest(self) -> dict[str, bytes]:
        """Change the manifest as JSON."""
        return {"config.json": self.dump(self.mutate_json(json.loads(self.original["config.json"])))}

    def change_program(self) -> dict[str, bytes]:
        """Change the program as JSON, with a right hash."""
        name = self.random.choice(self.programs)
        program = self.dump(self.mutate_json(json.loads(self.entries[name])))
        return self.sealed_entries({**self.entries, name: program})

    def nudge_program(self) -> dict[str, bytes]:
        """Change the program within its schema, so that the device's own checks are reached."""
        choice = self.random.choice
        entry = choice(self.programs)
        program = json.loads(self.entries[entry])
        names = [value["name"] for value in program["values"]]
        for _ in range(choice((1, 1, 2))):
            step = choice(program["steps"])
            launches = step.get("launches", [])
            place = choice(
                (
                    *launches,
                    *(arg for launch in launches for arg in (*launch["args"], *launch["grid"])),
                    *program.get("kernels", []),
                    step,
                    step.get("attrs", step),
                    step.get("attrs", step),
                    *program["values"],
                    *program["weights"],
                )
            )
            key = choice(list(place) or ["kernel"])
            value = place.get(key)
            if isinstance(value, bool):
                place[key] = not value
            elif isinstance(value, int | float):
                place[key] = choice((0, 1, value + 1, value * 2, value // 2, 64, 2**31 - 1, -value))
            elif isinstance(value, list) and value and key in ("inputs", "outputs"):
                value[self.random.randrange(len(value))] = choice(names)
            elif isinstance(value, list) and value and key == "shape":
                value[self.random.randrange(len(value))] = choice(("T", "N", 1, 8, 16, 32, 33, 64, 2**20))
            elif isinstance(value, list):
                self.random.shuffle(value)
            elif key == "kernel":
                place[key] = choice(program["steps"])["kernel"]
            elif isinstance(value, str):
                texts = [w["name"] for w in program["weights"]] + [
                    "f32",
                    "i32",
                    "bf16",
                    "plain",
                    "panel16",
                    "silu",
                ]
                place[key] = choice(texts)
        if self.random.random() < 0.2:
            limits = program["limits"]
            limits[choice(list(limits))] = choice((1, 2, 64, 2**20))
        changed = self.sealed_entries({**self.entries, entry: self.dump(program)})
        manifest = json.loads(changed["config.json"])
        manifest["limits"] = program["limits"]
        return {**changed, "config.json": json.dumps(manifest).encode()}

    def change_tensor_table(self) -> dict[str, bytes]:
        """Change the header of the weights as JSON, with a right hash."""
        raw = self.original["rank0.safetensors"]
        size = int.from_bytes(raw[:8], "little")
        text = self.dump(self.mutate_json(json.loads(raw[8 : 8 + size])))
        text += b" " * (-(8 + len(text)) % 64)
        return self.sealed("rank0.safetensors", len(text).to_bytes(8, "little") + text + raw[8 + size :])

    def flip_sealed(self) -> dict[str, bytes]:
        """Flip bits of a binary file, with a right hash."""
        name = self.random.choice(FILES[1:])
        data = self.original[name]
        if name == "rank0.safetensors":  # the table is what can go wrong
            size = 8 + int.from_bytes(data[:8], "little")
            return self.sealed(name, self.flip(data[:size]) + data[size:])
        return self.sealed(name, self.flip(data))

    def craft_zip(self) -> dict[str, bytes]:
        """Write a ZIP that another tool could write: compressed, duplicates, odd names, comments, extra
        fields.
        """
        entries = list(self.entries.items())
        self.random.shuffle(entries)
        if self.random.random() < 0.5:
            entries.append(
                (self.random.choice(("../x", "/abs", "graph.onnx", "a/../b", "x" * 300, "ü", "C:\\x")), b"x")
            )
        if self.random.random() < 0.3:
            entries.pop(self.random.randrange(len(entries)))
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, data in entries:
                info = zipfile.ZipInfo(name)
                if self.random.random() < 0.1:
                    info.extra = struct.pack("<HH", 0xCAFE, 4) + b"abcd"
                if self.random.random() < 0.1:
                    info.comment = b"comment"
                method = self.random.choice((0, 0, 0, 0, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
                archive.writestr(info, data, method)
            if self.random.random() < 0.1:
                archive.comment = self.random.randbytes(20)
        return self.sealed("rank0.engine", buffer.getvalue(), dict(entries))

    def damage_zip_structure(self) -> dict[str, bytes]:
        """Change numbers of the ZIP's headers and directory, with a right hash of the file."""
        data = bytearray(self.original["rank0.engine"])
        places = [i for i in range(len(data) - 46) if data[i : i + 4] in (b"PK\3\4", b"PK\1\2")] + [
            len(data) - 22
        ]
        for _ in range(self.random.randrange(1, 4)):
            place = self.random.choice(places) + self.random.randrange(46)
            size = self.random.choice((1, 2, 4))
            value = self.random.choice((0, 1, 0xFF, 0xFFFF, 0xFFFFFFFF, self.random.getrandbits(32))) % (
                1 << 8 * size
            )
            if place + size <= len(data):
                data[place : place + size] = value.to_bytes(size, "little")
        return self.sealed("rank0.engine", bytes(data))

    def change_golden(self) -> dict[str, bytes]:
        """Damage golden.safetensors, with right hashes around it."""
        raw = self.entries["golden.safetensors"]
        size = int.from_bytes(raw[:8], "little")
        if self.random.random() < 0.5:
            text = self.dump(self.mutate_json(json.loads(raw[8 : 8 + size])))
            raw = len(text).to_bytes(8, "little") + text + raw[8 + size :]
        else:
            raw = self.splice(self.flip(raw))
        return self.sealed_entries({**self.entries, "golden.safetensors": raw})

    def flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.random.choice((1, 1, 1, 2, 8))):
            changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def splice(self, data: bytes) -> bytes:
        start = self.random.randrange(len(data))
        size = min(self.random.choice((1, 4, 64, 1000)), len(data) - start)
        other = self.original[self.random.choice(FILES)]
        noise = (self.random.randbytes(size), bytes(size), b"\xff" * size, other[start : start + size])
        return data[:start] + self.random.choice(noise) + data[start + size :]

    def mutate_json(self, value: Any) -> Any:
        """Change one to three places of a JSON value: replace, delete, duplicate, rename, nest."""
        for _ in range(self.random.choice((1, 1, 2, 3))):
            holder, key = self.pick(value)
            if holder is None:
                return copy.deepcopy(self.random.choice(_ATOMS))
            action = self.random.random()
            if action < 0.5:
                holder[key] = copy.deepcopy(self.random.choice(_ATOMS))
            elif action < 0.6 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
                holder[key] += self.random.choice((-64, -1, 1, 64))
            elif action < 0.7:
                del holder[key]
            elif action < 0.8 and isinstance(holder, dict):
                holder[self.random.choice(("", "x", "__metadata__", "\ud800", "a" * 600))] = holder.pop(key)
            elif action < 0.9 and isinstance(holder, list):
                holder.insert(self.random.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
            elif isinstance(holder, list):
                other = self.random.randrange(len(holder))
                holder[key], holder[other] = holder[other], holder[key]
            else:
                holder[key] = [holder[key]]
        return value

    def pick(self, value: Any) -> tuple[Any, Any]:
        """Walk down to a random place; return its container and key."""
        holder, key = None, None
        while isinstance(value, dict | list) and value and (holder is None or self.random.random() < 0.8):
            holder = value
            key = (
                self.random.choice(list(value))
                if isinstance(value, dict)
                else self.random.randrange(len(value))
            )
            value = value[key]
        return holder, key

    def dump(self, value: Any) -> bytes:
        text = json.dumps(value).encode()
        return text.replace(b"1", b"9" * 5000, 1) if self.random.random() < 0.01 else text

    def sealed_entries(self, entries: dict[str, bytes]) -> dict[str, bytes]:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, data in entries.items():
                archive.writestr(zipfile.ZipInfo(name), data)
        return self.sealed("rank0.engine", buffer.getvalue(), entries)

    def sealed(self, name: str, data: bytes, entries: dict[str, bytes] | None = None) -> dict[str, bytes]:
        manifest = json.loads(self.original["config.json"])
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if entries is not None:
            manifest["entries"] = {
                entry: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                for entry, content in entries.items()
            }
        return {name: data, "config.json": json.dumps(manifest).encode()}


def run_core(engine: Engine) -> None:
    """Give an engine that the reader accepted to the C++ runtime, and generate a token."""
    with CoreRunner(engine, 8, RuntimeOptions(num_threads=1)) as runner:
        params = runner.make_params()
        params.max_tokens = 2
        try:
            runner.core.submit(np.asarray([1, 2, 3], np.int32), params)
        except ValueError:
            return
        deadline = time.monotonic() + 20
        while not any(event.finished for event in runner.core.poll(1.0)):
            assert time.monotonic() < deadline, "the runtime hangs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where to work; a RAM disk is fastest")
    parser.add_argument("--core", action="store_true", help="run what the reader accepts on the C++ runtime")
    options = parser.parse_args()
    if options.core:
        faulthandler.enable()
        # An engine may ask for any amount of memory; refusing it must not depend on the machine's.
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    import warnings

    warnings.simplefilter("ignore", UserWarning)  # zipfile's, about the duplicates made on purpose
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        fuzzer = Fuzzer(Path(folder), options.seed, options.core)
        for index in range(options.inputs):
            if options.core:  # a crash leaves this line behind
                print(f"\rinput {index} ", end="", file=sys.stderr, flush=True)
            try:
                fuzzer.run_one()
            except Exception:
                print(f"input {index} of seed {options.seed} broke the reader")
                raise
    for kind in sorted({kind for kind, _ in fuzzer.outcomes}):
        refused, opened = fuzzer.outcomes[kind, "refused"], fuzzer.outcomes[kind, "opened"]
        print(f"{kind:24s} refused {refused:7d}   opened {opened:7d}")
    seconds = time.perf_counter() - start
    print(f"{options.inputs} inputs, seed {options.seed}, {seconds:.0f} s: no exception but EngineError")


if __name__ == "__main__":
    main()
