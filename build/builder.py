"""The build: checkpoint -> graph -> program -> packed weights -> engine, checked against its source."""

from __future__ import annotations

import resource
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from castiron.errors import BuildError

from ..engines import EngineWriter, Limits, MemoryRow, Verification, open_engine
from ..engines.golden import make_golden
from ..engines.precision import precision, stored_dtypes
from ..engines.quantization import Quantization
from ..engines.writer import check_output_dir
from ..graph.custom import check_custom_ops
from ..graph.weights import WeightGraph, module_weights
from ..plugins import default_registry
from ..plugins.sdk import Plugin, load_plugin, register
from . import estimate
from .gpus import present_gpus
from .identity import model_identity, parameter_count, special_tokens
from .lower import Decision, Lowered, lower
from .measure import Reference, measure
from .options import BuildOptions, resolve_limits
from .progress import Phases, Progress, Silent
from .quantize import Quantized, decisions, quantize, section
from .report import BuildPlan, BuildReport
from .source_tokenizer import SourceTokenizer, read_tokenizer
from .weight_table import WeightPool

if TYPE_CHECKING:
    from ..graph.checkpoint import Checkpoint
    from ..graph.passes import PassReport
    from ..graph.quant_plan import QuantPlan

_NO_DEVICE = "this machine has no device for its targets; add --target host to compare it here"
_NO_CORE = "the C++ runtime (castiron.runtime._core) is not installed here"


def build(
    model_dir: str | Path,
    output_dir: str | Path,
    options: BuildOptions | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Cast a Hugging Face checkpoint into an engine.

    ``model_dir``: a Hugging Face folder, a hub id, or a GGUF file. ``output_dir``: where the engine will be;
    it appears whole or not at all. Raises CheckpointError, UnsupportedModelError or BuildError; a failed
    comparison with the source model is a BuildError and leaves nothing behind.
    """
    options = options or BuildOptions()
    options.check()
    phases = Phases(progress or Silent())
    if not options.dry_run:
        check_output_dir(Path(output_dir).absolute(), options.overwrite)
    with phases("read checkpoint"):
        from ..graph.checkpoint import Checkpoint

        checkpoint = Checkpoint.open(model_dir)
    with checkpoint:
        tokenizer = read_tokenizer(checkpoint)  # what is wrong is told here, not after hours of packing
        return _build(checkpoint, tokenizer, Path(output_dir), options, phases)


def _build(
    checkpoint: Checkpoint,
    tokenizer: SourceTokenizer | None,
    output_dir: Path,
    options: BuildOptions,
    phases: Phases,
) -> BuildReport:
    plugins = [load_plugin(path) for path in options.plugins]
    with phases("import transformers"):
        limits = resolve_limits(options, checkpoint.hf_config)
    with phases("capture graph"):
        from ..graph import capture

        takeovers = [module for plugin in plugins for module in plugin.modules]
        captured = capture(checkpoint, max_seq_len=limits.max_seq_len, takeovers=takeovers)
    quantized = quantize(
        checkpoint, captured, options.quantization, limits.max_seq_len, options.dtype, phases
    )
    with phases("rewrite graph"):
        model, passes = _rewrite(captured.model, limits, options, plugins, quantized.plan)
    with phases("lower"):
        targets = options.resolved_targets()
        registry, pool = default_registry(targets), WeightPool(WeightGraph(model))
        modules = module_weights(captured.model)
        check_custom_ops(model, register(plugins, registry))
        lowered = [
            lower(
                model,
                target,
                limits,
                options.dtype,
                registry,
                pool,
                options.activations,
                modules,
                options.lora_rank,
            )
            for target in targets
        ]
    ignored = [f"{name} is not used: {why}" for name, why in captured.report.ignored.items()]
    notes = [*checkpoint.notes, *captured.report.notes, *ignored]
    about = section(quantized, model, pool.graph, options.dtype)
    plan = _plan(checkpoint, model, lowered, limits, options, None if about is None else about.recipe)
    phases.progress.plan(plan)
    for note in (*checkpoint.notes, *captured.report.notes):
        phases.progress.note(note)
    report = BuildReport(
        output_dir=str(output_dir),
        plan=plan,
        passes=tuple((one.name, one.applied) for one in passes),
        decisions=(*(() if about is None else decisions(about)), *_decisions(lowered)),
        notes=tuple(notes),
        quantization=about,
        dry_run=options.dry_run,
    )
    if not options.dry_run:
        _check_disk(output_dir, plan.disk_bytes)
        with EngineWriter(output_dir, overwrite=options.overwrite) as writer:
            report = _write(writer, checkpoint, tokenizer, model, lowered, report, options, phases, quantized)
    return replace(report, phases=dict(phases.seconds), peak_rss_bytes=_peak_rss())


def _decisions(lowered: list[Lowered]) -> tuple[dict[str, str], ...]:
    """What was chosen for each op, targets that agree in one line."""
    targets: dict[Decision, list[str]] = {}
    for one in lowered:
        for decision in one.decisions:
            targets.setdefault(decision, []).append(one.program.target)
    return tuple(
        {
            "what": f"{', '.join(names)}: {decision.op} x{decision.count}",
            "choice": decision.tactic,
            "why": "lowest estimated cost",
        }
        for decision, names in targets.items()
    )


def _rewrite(
    model: onnx.ModelProto,
    limits: Limits,
    options: BuildOptions,
    plugins: list[Plugin],
    quantization: QuantPlan,
) -> tuple[onnx.ModelProto, list[PassReport]]:
    from ..graph.passes import PassContext, run_passes

    patterns = tuple(pattern for plugin in plugins for pattern in plugin.patterns)
    return run_passes(model, PassContext(limits.max_seq_len, patterns, quantization), options.dump_graph)


def _plan(
    checkpoint: Checkpoint,
    model: onnx.ModelProto,
    lowered: list[Lowered],
    limits: Limits,
    options: BuildOptions,
    recipe: str | None,
) -> BuildPlan:
    if options.verify == "always" and not _has_core():
        raise BuildError(
            f"the engine cannot be compared with the source model: {_NO_CORE}; install castiron's wheel"
        )
    runs_here = _runs_here(lowered)
    if options.verify == "always" and not runs_here:
        raise BuildError(f"the engine cannot be compared with the source model: {_NO_DEVICE}")
    fits = estimate.fits_verification(lowered) and _has_core() and runs_here
    verify = options.verify == "always" or (options.verify == "auto" and fits)
    programs = [one.program for one in lowered]
    return BuildPlan(
        model=checkpoint.source,
        architecture=checkpoint.names.class_name,
        parameters=parameter_count(checkpoint),
        dtype=options.dtype,
        stored_dtypes=tuple(stored_dtypes(programs)) or (options.dtype,),
        precision=precision(options.dtype, recipe, programs),
        limits=limits,
        memory={one.program.target: one.memory for one in lowered},
        disk_bytes=estimate.disk_bytes(lowered, model, checkpoint.folder, golden=options.verify != "never"),
        peak_bytes=estimate.peak_bytes(lowered, verify=verify),
        verify=verify,
    )


def _check_disk(output_dir: Path, needed: int) -> None:
    folder = output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BuildError(
            f"the engine needs about {needed / 1e6:,.1f} MB and {folder} has {free / 1e6:,.1f} MB free; "
            "free some space or choose another output folder"
        )


def _write(
    writer: EngineWriter,
    checkpoint: Checkpoint,
    tokenizer: SourceTokenizer | None,
    model: onnx.ModelProto,
    lowered: list[Lowered],
    report: BuildReport,
    options: BuildOptions,
    phases: Phases,
    quantized: Quantized,
) -> BuildReport:
    sources = {name: source for one in lowered for name, source in one.sources.items()}
    lowered, report = _compile(writer, lowered, report, phases)
    for one in lowered:
        writer.add_program(one.program)
    writer.add_graph(model.SerializeToString())
    with phases("pack weights", sum(source.nbytes for source in sources.values())):
        done = 0

        def packed(position: int, total: int) -> None:
            nonlocal done
            phases.progress.advance(position - done)
            done = position

        writer.write_weights(sources.values(), packed)
    if writer.copy_tokenizer(checkpoint.folder) and tokenizer is None:
        phases.progress.note("the checkpoint has no tokenizer.json: the engine takes and gives token ids")
    tokens = special_tokens(checkpoint, lowered[0].program.vocab_size, tokenizer)
    reference = Reference(checkpoint, quantized.plan, report.plan.limits.max_seq_len)
    if options.verify != "never":
        with phases("golden outputs"):
            text = None if tokenizer is None else tokenizer.golden_ids
            golden = make_golden(reference.model, tokens.vocab_size_used, report.plan.limits, text)
            writer.add_golden(golden)
    report = replace(report, phases=dict(phases.seconds), peak_rss_bytes=_peak_rss())
    writer.add_build_report(report.to_dict())
    rows = _memory_rows(lowered, writer)
    with phases("write engine"):
        writer.finish(
            model=model_identity(checkpoint, options.dtype), special_tokens=tokens, memory_plan=rows
        )
    if report.quantization is not None:
        about = _measure(report.quantization, writer, reference, lowered, report, options, phases)
        writer.record_quantization(about)
        report = replace(report, quantization=about)
    if options.verify == "never":
        return report
    if not report.plan.verify:
        why = _why_not_verified(lowered)
        command = f"castiron verify {report.output_dir}"
        note = f"not compared with the source model: {why}; run '{command}' where it serves"
        phases.progress.note(note)
        return replace(report, notes=(*report.notes, note))
    with phases("verify"):
        verification = _verify(writer.path, options, phases)
    writer.record_verification(verification)
    return replace(report, verification=verification)


def _compile(
    writer: EngineWriter, lowered: list[Lowered], report: BuildReport, phases: Phases
) -> tuple[list[Lowered], BuildReport]:
    """Compile the kernels that the programs ask for and hand their images to the writer."""
    from .kernels.compile import compile_kernels, count_kernels

    count = count_kernels(lowered)
    if not count:
        return lowered, report
    with phases("compile kernels", count):
        done = compile_kernels(lowered, phases.progress.advance)
    writer.add_images(done.images)
    size = sum(map(len, done.images.values()))
    decision = {
        "what": f"{count} kernels, {size / 1e6:.1f} MB",
        "choice": f"{count - done.from_cache} compiled, {done.from_cache} from the cache",
        "why": "compiled ahead of time for every target",
    }
    for note in done.notes:
        phases.progress.note(note)
    return done.lowered, replace(
        report, decisions=(*report.decisions, decision), notes=(*report.notes, *done.notes)
    )


def _memory_rows(lowered: list[Lowered], writer: EngineWriter) -> list[MemoryRow]:
    rows = []
    for one in lowered:
        target = f"{one.program.target}: " if len(lowered) > 1 else ""
        for item in one.memory.items:
            rows.append(MemoryRow(item=f"{target}{item.item}", bytes=item.bytes, note=item.note))
        size = writer.image_bytes(one.program)
        if size:
            rows.append(
                MemoryRow(item=f"{target}kernels", bytes=size, note="machine code or PTX, loaded once")
            )
    return rows


def _runs_here(lowered: list[Lowered]) -> bool:
    targets = [one.program.target for one in lowered]
    return "host" in targets or bool(present_gpus())


def _why_not_verified(lowered: list[Lowered]) -> str:
    if not _has_core():
        return _NO_CORE
    if not _runs_here(lowered):
        return _NO_DEVICE
    return "the weights are too large for the build to load them"


def _measure(
    about: Quantization,
    writer: EngineWriter,
    reference: Reference,
    lowered: list[Lowered],
    report: BuildReport,
    options: BuildOptions,
    phases: Phases,
) -> Quantization:
    """The section with the accuracy report; on the engine where it runs here, else on its reference."""
    wanted = options.quantization
    if wanted.eval_tokens == 0 or not wanted.wanted:
        return about
    writer.record_quantization(about)
    on_engine = estimate.fits_verification(lowered) and _has_core() and _runs_here(lowered)
    engine = open_engine(writer.path) if on_engine else None
    found = measure(reference, engine, wanted, options.num_threads, phases)
    if wanted.max_kl is not None and not found.mean_kl <= wanted.max_kl:
        worst = ", ".join(layer.name for layer in about.worst_layers[:3]) or "unknown without calibration"
        raise BuildError(
            f"the mean KL to the unquantized model is {found.mean_kl:.4g} nats over {found.predictions} "
            f"predictions of {found.text.name}; --max-kl allows {wanted.max_kl:g}, so the engine was not "
            f"written. Products that lose most: {worst}. {about.suggestion}"
        )
    return about.model_copy(update={"accuracy": found})


def _verify(path: Path, options: BuildOptions, phases: Phases) -> Verification:
    from ..runtime.options import RuntimeOptions
    from ..runtime.verify import verify

    # The plugins are those that the user has just named.
    result = verify(
        open_engine(path), options=RuntimeOptions(num_threads=options.num_threads, trust_plugins=True)
    )
    if not result.passed:
        raise BuildError(
            "the engine does not reproduce the source model, so it was not written: "
            + "; ".join(result.problems[:3])
        )
    return result.summary()


def _has_core() -> bool:
    """Whether the C++ runtime is installed beside this package; a source tree without a build lacks it."""
    return find_spec("castiron.runtime._core") is not None


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
