"""Seconds from a fresh interpreter to the first token, imports included: ``first_token.py ENGINE``."""

import sys
import time

_BEGAN = time.perf_counter()

from castiron import ModelRunner  # noqa: E402 - the import is a part of what is measured

with ModelRunner.from_dir(sys.argv[1]) as runner:
    (result,) = runner.generate(input_ids=[5, 6, 7], max_new_tokens=1)
    seconds = time.perf_counter() - _BEGAN
    if result.error is not None:
        raise SystemExit(result.error)
    print(f"RESULT {seconds:.4f}")
