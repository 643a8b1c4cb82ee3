"""Completes an engine of the kit that came without weights: random matrices, ones elsewhere.

fill_weights.py HOLLOW_FOLDER
"""

from __future__ import annotations

import argparse
import json
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from castiron.engines.layout import MANIFEST, PROGRAM_FILE, WEIGHTS_FILE
from castiron.engines.manifest import FileRecord, Manifest
from castiron.engines.program import Program, Weight
from castiron.engines.weights_file import ALIGNMENT, layout_bytes
from castiron.engines.weights_writer import write_weights

#: As kit_engines.py writes it.
HOLLOW_MANIFEST = "hollow.json"
_CHUNK = 64 << 20
_SCALE = 0.02


class _Random:
    """A weight as ``write_weights`` takes it. Chunks are cut from one block of random numbers."""

    def __init__(self, weight: Weight, block: memoryview) -> None:
        self.name, self.dtype = weight.name, weight.dtype
        self.stored_shape = weight.shape
        self.nbytes = layout_bytes(weight)
        if weight.layout != "plain" or self.nbytes % ALIGNMENT:
            raise SystemExit(f"{weight.name}: expected a plain weight of a multiple of {ALIGNMENT} bytes")
        self._block = block

    def chunks(self) -> Iterator[memoryview]:
        for start in range(0, self.nbytes, _CHUNK):
            yield self._block[: min(_CHUNK, self.nbytes - start)]


def fill(folder: Path) -> None:
    """Write the weights and the manifest."""
    manifest = Manifest.model_validate_json((folder / HOLLOW_MANIFEST).read_bytes())
    (target,) = manifest.targets
    with zipfile.ZipFile(folder / PROGRAM_FILE) as archive:
        program = Program.model_validate(json.loads(archive.read(f"{target}/program.json")), strict=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = torch.randn(_CHUNK // 2, device=device).mul_(_SCALE)
    halves = {
        "bf16": numbers.to(torch.bfloat16).cpu().view(torch.uint8).numpy(),
        "f16": numbers.to(torch.float16).cpu().view(torch.uint8).numpy(),
        # Norms' weights, and tables of cosines and sines: their values matter to no time.
        "f32": torch.ones(_CHUNK // 4).view(torch.uint8).numpy(),
    }
    blocks = {dtype: memoryview(block.data) for dtype, block in halves.items()}
    sources = [_Random(weight, blocks[weight.dtype]) for weight in program.weights]
    (folder / WEIGHTS_FILE).unlink(missing_ok=True)
    size, digest = write_weights(folder / WEIGHTS_FILE, sources)
    files = {**manifest.files, WEIGHTS_FILE: FileRecord(size=size, sha256=digest)}
    text = manifest.model_copy(update={"files": files}).model_dump_json(indent=2)
    (folder / MANIFEST).write_text(text)
    numbers_stored = sum(math.prod(weight.shape) for weight in program.weights)
    print(f"{folder}: {numbers_stored / 1e9:.2f} billion numbers, {size / 1e9:.2f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    fill(parser.parse_args().folder)


if __name__ == "__main__":
    main()
