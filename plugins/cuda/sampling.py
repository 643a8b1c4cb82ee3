"""Sampling on the device: from logits to tokens and log-probabilities, in cpp/sampling/sampler.h's terms; and
from the tokens to the inputs of the next step.

A greedy step without edits and log-probabilities is two launches; the others depend on the counts of edits
(symbol E), of rows drawn at random (R) and of rows that want log-probabilities (L).
"""

from __future__ import annotations

from collections.abc import Mapping

from ...engines.program import StepInput
from ..launch import Grid, KernelLaunch, Param, TritonKernel, When, size, step_input, value
from ..tactic import FEED, SAMPLE, Call, Context, Lowering, Op, Operand, Tactic, bandwidth_cost
from .kernels import feed, sampling_greedy, sampling_logprobs, sampling_random
from .reference_sampling import feed_sampled, sample
from .types import next_power_of_two

#: Most log-probabilities of a row beside the chosen token's.
MOST_LOGPROBS = 20
#: Tokens that one program reads: 32 for each thread of 8 warps.
_CHUNK = 8192
#: Candidates kept of a chunk. Frequent tokens have low ids, so one chunk may hold most of them.
_CANDIDATES = 512
_EDITS_PER_PROGRAM = 256
_FED_PER_PROGRAM = 256

_F32, _I32 = "*fp32", "*i32"
_INPUT_TYPES: Mapping[StepInput, str] = {
    "temperature": _F32,
    "top_k": _I32,
    "top_p": _F32,
    "min_p": _F32,
    "uniform": _F32,
    "num_logprobs": _I32,
    "repetition": _F32,
    "frequency": _F32,
    "presence": _F32,
    "edit_row": _I32,
    "edit_token": _I32,
    "edit_count": _I32,
}


class _Sampling:
    """Launches over one logits value; ``arrays`` maps parameter names of the kernels to values."""

    def __init__(self, op: Op, chunk: int, candidates: int) -> None:
        logits = op.required(0)
        vocab = logits.shape[1]
        assert isinstance(vocab, int)
        prefix = op.outputs[0].name
        chunks = -(-vocab // chunk)
        self.sizes = {
            "VOCAB": vocab,
            "CHUNK": chunk,
            "CHUNKS": chunks,
            "PADDED_CHUNKS": next_power_of_two(chunks),
            "CANDIDATES": candidates,
            "MOST": MOST_LOGPROBS,
            "PADDED_MOST": next_power_of_two(MOST_LOGPROBS),
            "BLOCK": _EDITS_PER_PROGRAM,
        }
        self.rows, self.row_chunks = (Grid("N"),), (Grid("N"), Grid(times=chunks))
        self.edits = (Grid("E", _EDITS_PER_PROGRAM),)
        self.temporaries = {
            "saved": Operand(f"{prefix}.saved", ("E",)),
            "peaks": Operand(f"{prefix}.peaks", ("N", chunks)),
            "tokens": Operand(f"{prefix}.tokens", ("N", chunks), "i32"),
            "masses": Operand(f"{prefix}.masses", ("N", chunks)),
            "counts": Operand(f"{prefix}.counts", ("N", chunks), "i32"),
            "candidate_logits": Operand(f"{prefix}.candidate_logits", ("N", chunks * candidates)),
            "candidate_tokens": Operand(f"{prefix}.candidate_tokens", ("N", chunks * candidates), "i32"),
            "top_logits": Operand(f"{prefix}.top_logits", ("N", chunks * MOST_LOGPROBS)),
            "top_tokens": Operand(f"{prefix}.top_tokens", ("N", chunks * MOST_LOGPROBS), "i32"),
        }
        results = dict(zip(("sampled", "result_tokens", "result_logprobs"), op.outputs, strict=True))
        self.arrays = {"logits": logits, **self.temporaries, **results}

    def launch(
        self,
        function: object,
        parameters: str,
        constants: str,
        grid: tuple[Grid, ...],
        when: When | None = None,
        *,
        num_warps: int = 8,
        **flags: bool,
    ) -> KernelLaunch:
        """A launch; parameters and constants are named as the kernel names them."""
        types: dict[str, str] = {}
        args: list[Param] = []
        for name in parameters.split():
            if name in self.arrays:
                operand = self.arrays[name]
                types[name] = _I32 if operand.dtype == "i32" else _F32
                args.append(value(operand.name))
            elif name in ("vocab_limit", "edits"):
                types[name] = "i32"
                args.append(size("V" if name == "vocab_limit" else "E"))
            else:
                array = next(known for known in _INPUT_TYPES if known == name)
                types[name] = _INPUT_TYPES[array]
                args.append(step_input(array))
        known = {name: self.sizes[name] for name in constants.split()}
        kernel = TritonKernel(function, types, {**known, **flags}, num_warps=num_warps, num_stages=1)
        return KernelLaunch(kernel, grid, tuple(args), when)


def _launches(s: _Sampling) -> tuple[KernelLaunch, ...]:
    greedy, random, logprobs = sampling_greedy, sampling_random, sampling_logprobs
    edited, drawn, listed = When("E", 1), When("R", 1), When("L", 1)
    chunking = "VOCAB CHUNK CHUNKS PADDED_CHUNKS CANDIDATES"
    draw = (
        "logits peaks sampled temperature top_k top_p min_p uniform masses counts candidate_logits "
        "candidate_tokens vocab_limit"
    )
    return (
        s.launch(
            greedy.apply_edits,
            "logits edit_row edit_token edit_count repetition frequency presence saved edits",
            "VOCAB BLOCK",
            s.edits,
            edited,
            num_warps=4,
        ),
        s.launch(greedy.largest_of_chunks, "logits peaks tokens vocab_limit", "VOCAB CHUNK", s.row_chunks),
        s.launch(greedy.choose_largest, "peaks tokens sampled", "CHUNKS PADDED_CHUNKS", s.rows, num_warps=1),
        s.launch(
            random.gather_candidates,
            "logits peaks sampled temperature masses counts candidate_logits candidate_tokens vocab_limit",
            chunking,
            s.row_chunks,
            drawn,
            num_warps=16,
        ),
        s.launch(random.draw, draw, chunking, s.rows, drawn, num_warps=16, WHOLE=False),
        s.launch(random.draw, draw, chunking, s.rows, drawn, num_warps=16, WHOLE=True),
        s.launch(
            greedy.undo_edits,
            "logits edit_row edit_token saved edits",
            "VOCAB BLOCK",
            s.edits,
            edited,
            num_warps=4,
        ),
        s.launch(
            logprobs.logprobs_of_chunks,
            "logits num_logprobs peaks masses top_logits top_tokens vocab_limit",
            "VOCAB CHUNK CHUNKS MOST",
            s.row_chunks,
            listed,
        ),
        s.launch(
            logprobs.logprobs_of_rows,
            "logits sampled num_logprobs peaks masses top_logits top_tokens result_tokens result_logprobs",
            "VOCAB CHUNKS PADDED_CHUNKS MOST PADDED_MOST",
            s.rows,
            listed,
            num_warps=4,
        ),
    )


def _lower(op: Op, context: Context) -> Lowering:
    return lower_in_chunks(op, _CHUNK, _CANDIDATES)


def lower_in_chunks(op: Op, chunk: int, candidates: int) -> Lowering:
    """Lower with ``chunk`` tokens a program, of which ``candidates`` are kept: powers of two."""
    sampling = _Sampling(op, chunk, candidates)
    temporaries = tuple(sampling.temporaries.values())
    call = Call(
        "sample",
        [op.required(0).name],
        [o.name for o in (*op.outputs, *temporaries)],
        launches=_launches(sampling),
    )
    return Lowering((call,), temporaries)


def _lower_feed(op: Op, context: Context) -> Lowering:
    types = {"token_ids": _I32, "token_source": _I32, "sampled": _I32, "tokens": "i32"}
    kernel = TritonKernel(feed.feed_sampled, types, {"BLOCK": _FED_PER_PROGRAM}, num_warps=4, num_stages=1)
    sampled = op.required(0).name
    args = (step_input("token_ids"), step_input("token_source"), value(sampled), size("T"))
    launch = KernelLaunch(kernel, (Grid("T", _FED_PER_PROGRAM),), args)
    return Lowering((Call("feed_sampled", [sampled], [], launches=(launch,)),))


TACTICS = (
    Tactic(
        "cuda.feed_sampled",
        FEED,
        "cuda",
        lambda op, _: len(op.inputs) == 1,
        _lower_feed,
        bandwidth_cost,
        feed_sampled,
    ),
    Tactic(
        "cuda.sample",
        SAMPLE,
        "cuda",
        lambda op, _: len(op.inputs) == 1,
        _lower,
        bandwidth_cost,
        sample,
    ),
)
