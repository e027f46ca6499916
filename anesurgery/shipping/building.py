"""Build a folder that generates text from a checkpoint of Hugging Face (`anesurgery.build`).

The stages are: convert the checkpoint, compress its weights, add a cache (`llm_ane`), split into chunks. Each
stage writes a package to `stages/`, with a record of everything that it was made from, so that a build that
was stopped goes on after its last complete stage. Then the logits are compared with the checkpoint's
(`agreement`), and `runner.json` is written last: a folder that has it is complete. It says for each function
of the model its inputs, outputs and states, the context, and which chunks have it. A runner is this library's
`chat`, or the Swift package that `swift` writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery import __version__, registry
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.compressing.compression import compress
from anesurgery.compressing.modes import read_mode
from anesurgery.display import Drawn, counted, read_size
from anesurgery.doors import door
from anesurgery.errors import LoadError, NotExpressible, PassError, SurgeryError, Unsuited, first_line
from anesurgery.files import arrays
from anesurgery.files.package import save, to_mlmodel
from anesurgery.files.runner_file import NAME, Runner, hashes_of, sha256_of
from anesurgery.files.writing import check_place, link_or_copy, scratch_folder, write_atomically
from anesurgery.interpret.decoder_calls import INPUTS
from anesurgery.interpret.decoding import Decoder
from anesurgery.interpret.predictor import Predictor
from anesurgery.loading import load
from anesurgery.mil import (
    Array,
    Program,
    Var,
    blocks,
    dtype_name,
    is_compressed,
    is_constexpr,
    mb,
    patched,
    quiet_host,
    replace_uses,
    silent_host,
    static_shape,
    types,
)
from anesurgery.placement.cost import LAST_FEW_ROWS_FAMILY
from anesurgery.placement.inspector import inspect
from anesurgery.placement.target import Target
from anesurgery.regions.compressed_weights import decoded
from anesurgery.rewriting.both_formats import BOTH, CORE_ML, check_format, write_beside
from anesurgery.shipping import agreement
from anesurgery.shipping.agreement import Judge, logits_of_text
from anesurgery.shipping.checkpoint import Checkpoint, mapped_constants, quiet_transformers
from anesurgery.shipping.converting import LOGITS, TOKENS, convert
from anesurgery.shipping.recurrent_states import DecoderStep, convert_step, finished_decoder, is_step, step_of
from anesurgery.splitting.cuts import chunk_numbers
from anesurgery.splitting.split import split
from anesurgery.surgery import Recipe, Surgery, apply


def _runner_of(folder: Path, model: str, checkpoint: Checkpoint, most: int, hashes: dict[str, str]) -> Runner:
    """Return the content of `runner.json` for a folder; `model` is the package, or the folder of chunks, in it.

    `most` is the most tokens of a text: a recurrent state would take any number. `hashes` are of the files.
    """
    decoder = Decoder(folder / model)
    call = decoder.calls[-1]
    manifest = folder / model / "chain.json"
    names = json.loads(manifest.read_text(encoding="utf-8"))["models"] if manifest.is_file() else []
    return Runner(
        model=model,
        chunks=tuple(f"{model}/{name}" for name in names) or (model,),
        functions=_described_functions(folder / model, decoder, most),
        tokens=call.tokens,
        logits=call.output,
        context=min(decoder.context, most),
        tokenizer=TOKENIZER if TOKENIZER in hashes else "",
        template=TEMPLATE if TEMPLATE in hashes else "",
        special=checkpoint.special,
        ends=checkpoint.ends,
        sampling={} if call.greedy else checkpoint.sampling,
        hashes=hashes,
        values=call.values,
    )


def _described_functions(model: Path, decoder: Decoder, most: int) -> dict[str, Any]:
    """Return the description of each function of a model: its inputs, outputs, states, chunks and context."""
    contexts = {call.name: min(call.context, most) for call in decoder.calls}
    pickers = {call.name: call.picker for call in decoder.calls}
    predictor = Predictor(model)
    names = predictor.functions
    descriptions = {}
    for name in names:
        input_ports, output_ports = Predictor(predictor, function=name).ports
        states = {n: v for n, v in input_ports.items() if types.is_state(v.sym_type)}
        inputs = {n: v for n, v in input_ports.items() if n not in states}
        input_maker = f"{name}{INPUTS}" if f"{name}{INPUTS}" in names else ""
        descriptions[name] = {
            "inputs": _described_ports(inputs),
            "outputs": _described_ports(output_ports),
            "states": {n: _described_state(v) for n, v in states.items()},
            "inputs_from": input_maker,
            "chunks": [i for i, part in enumerate(predictor.parts) if name in part.program.functions],
            "context": contexts.get(name.removesuffix(INPUTS), most),
            "picks": pickers.get(name, ""),
            "units": "cpuOnly" if name.endswith(INPUTS) else "cpuAndNeuralEngine",
        }
    return descriptions


def _described_ports(values: Mapping[str, Var]) -> dict[str, Any]:
    return {n: {"shape": list(static_shape(v) or ()), "dtype": dtype_name(v)} for n, v in values.items()}


def _described_state(state: Var) -> dict[str, Any]:
    held = state.sym_type.wrapped_type()
    return {"shape": [int(d) for d in held.get_shape()], "dtype": types.builtin_to_string(held.get_primitive())}


SINGLE_ROWS = "pointwise_convolution"
"""The pass for matrix products of one row. Up to the A14 and the M1 these were measured on the CPU at each
width (`cost.LAST_FEW_ROWS_FAMILY`)."""
STAGES, REPORT, STEPS = "stages", "report.json", "steps"
COMPRESSED, UNPACKED = "compressed", "unpacked"
MODEL, ASSET, CHUNKS = "model.mlpackage", "model.aimodel", "chunks"
TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
DEFAULT_CONTEXT = 2048
"""The context by default; less where the checkpoint was made for less."""
CONVERSION_DATE = "com.github.apple.coremltools.conversion_date"
"""Removed, so that the same checkpoint is built to the same bytes."""
BITS = (4, 8)
HEADS = ("logits", "argmax")
TWICE = 0.01
"""Share of the weights that chunks may store more than once without a note."""


@dataclass(frozen=True)
class Options:
    """The options of a build, checked, with defaults filled in."""

    context: int
    target: str | None
    bits: int | None
    limit: str | None
    prefill: int
    cache: str
    contexts: tuple[int, ...] = ()
    shorter: tuple[int, ...] = ()
    width: int = 1
    head: str = HEADS[0]
    samples: str | None = None
    """The name of the file of samples."""
    format: str = CORE_ML

    @property
    def of_functions(self) -> dict[str, Any]:
        """The options of `llm_ane` that decide which functions the model has."""
        names = ("context", "prefill", "cache", "contexts", "shorter", "width")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Build(Drawn):
    """A folder that was built, with its figures."""

    folder: Path
    """The folder; it can be copied or shipped as it is."""
    options: Options
    """The options of the build."""
    bytes: int
    """Size of the model's files."""
    chunks: int
    """Packages that run one after the other; 1 where the model is not split."""
    psnr: float
    """PSNR in dB of the model's logits beside the checkpoint's."""
    top: float
    """Share of positions at which both find the same token the likeliest."""
    off: float
    """Largest difference of a logit from the checkpoint's, as a share of the range of all logits."""
    placed: Mapping[str, str] = field(default_factory=dict)
    """Function -> where it runs, in words; empty without a target."""
    notes: tuple[str, ...] = ()
    """Sentences that the user should read."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data that does not depend on the folder; rounded, as sums depend on the processor."""
        rounded = {"psnr": round(self.psnr, 1), "top": round(self.top, 3), "off": float(f"{self.off:.1e}")}
        plain = asdict(self) | rounded | {"notes": list(self.notes)}
        return {name: value for name, value in plain.items() if name != "folder"}


@door()
def build(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    context: int | None = None,
    target: Target | str | None = None,
    bits: int | None = None,
    limit: str | None = None,
    prefill: int = 64,
    cache: str = "state",
    contexts: Sequence[int] = (),
    shorter: Sequence[int] = (),
    width: int = 1,
    head: str = "logits",
    samples: str | os.PathLike[str] | None = None,
    format: str = "coreml",
    overwrite: bool = False,
    quiet: bool = False,
) -> Build:
    """Build a folder that writes text from a checkpoint: model, tokenizer, template and `runner.json`.

    Args:
        folder: of a causal language model as transformers saves it: config, safetensors and tokenizer.
        out: the folder to make. A build that was interrupted there resumes.
        context: the most tokens of prompt and answer together. Default: 2048, or what the model was made for.
        target: chip and OS, as "M4/macOS 15".
        bits: 4 or 8 bits for each weight, with one scale for each output channel. Default: fp16.
        limit: the most bytes of weights in a chunk, such as "900 MB". Default: one package.
        prefill: tokens of the prompt that are read at once.
        cache: "state" keeps the cache in a state, "io" in inputs and outputs.
        contexts: add functions for smaller contexts. They share the weights and the cache; a
            runner takes the smallest that fits.
        shorter: add functions that read fewer tokens at once: short prompts, and the rest of long ones.
        width: tokens that a step reads; the last one is new. Use more than 1 for engines on which queries of
            few positions fail.
        head: "logits" of all tokens, or "argmax": the likeliest token of each part of the vocabulary. With the
            latter, which comes with its logit, nothing can be sampled.
        samples: with `bits`: a text file that resembles the model's output. It keeps the rounding error small.
        format: "coreml", "coreai" for an .aimodel (iOS and macOS 27), or "both", compared. `chat` reads either.
        overwrite: may a finished build be replaced?
        quiet: no progress bars.

    Returns:
        The `Build`: the folder, its bytes, the PSNR in dB of its logits beside those of the checkpoint, and
        where each function runs on the target.

    Raises:
        LoadError: the checkpoint cannot be read or converted, or `out` cannot be written.
        SurgeryError: no cache can be added, the model differs from the checkpoint, or an option has a wrong
            value.
        UnknownName: there is no such format.
    """
    source, place = (Path(given).expanduser().absolute() for given in (folder, out))
    checkpoint = Checkpoint.read(source)
    text = None if samples is None else Path(samples).expanduser().absolute()
    options = Options(
        context=min(DEFAULT_CONTEXT, checkpoint.positions or DEFAULT_CONTEXT) if context is None else context,
        target=None if target is None else str(Target.parse(target)),
        bits=bits,
        limit=limit,
        prefill=prefill,
        cache=cache,
        contexts=tuple(contexts),
        shorter=tuple(shorter),
        width=width,
        head=head,
        samples=None if text is None else text.name,
        format=check_format(format),
    )
    _check_options(options, checkpoint.positions)
    _check_format(options)
    _check_out(place, overwrite)
    return _Builder(checkpoint, place, options, quiet, text).build()


def _check_options(options: Options, most: int | None) -> None:
    """Check the options of the model; `most` is the number of positions that the checkpoint was made for."""
    context, bits = options.context, options.bits
    if options.head not in HEADS:
        raise SurgeryError(f"head={options.head!r}; it may be {' or '.join(map(repr, HEADS))}")
    if context < 2:
        raise SurgeryError(f"context={context}; it must be 2 or more")
    if most is not None and context > most:
        raise SurgeryError(f"context={context}; the checkpoint was made for {most} positions at most")
    if bits is not None and bits not in BITS:
        raise SurgeryError(f"bits={bits}; it may be {' or '.join(map(str, BITS))}")
    _recipe(**options.of_functions)  # says what it does not take
    if (largest := max(options.contexts, default=0)) >= context:
        raise SurgeryError(f"contexts={largest} is no smaller context than that of {context} tokens")
    if options.samples is not None and bits is None:
        raise SurgeryError("samples say how weights are rounded to fewer bits; give bits=4 or 8 too")


def _check_format(options: Options) -> None:
    """Check the size limit, and that the format can be written.

    Raises:
        SurgeryError: it cannot, or has no chunks to limit.
    """
    if options.limit is not None:
        read_size(options.limit)
    if options.format != CORE_ML:
        registry.writer_of(Path(ASSET))
        if options.limit is not None:
            raise SurgeryError(f"format={options.format!r}: a Core AI model is one file; leave limit out")


def _check_out(place: Path, overwrite: bool) -> None:
    """Check that a build may write to a folder.

    Raises:
        LoadError: the place holds a finished build or other files.
    """
    if (place / NAME).exists() and not overwrite:
        shutil.rmtree(place / STAGES, ignore_errors=True)  # left by a kill after the last file
        raise LoadError(f"{place} holds a finished build; give another folder, or overwrite=True (--overwrite)")
    if place.exists() and not place.is_dir():
        raise LoadError(f"{place} is a file; give a folder")
    if place.is_dir() and any(place.iterdir()) and not ((place / STAGES).is_dir() or (place / NAME).exists()):
        raise LoadError(f"{place} is not empty, and holds no build; give another folder")
    if not place.exists():
        check_place(place, overwrite=False)


@dataclass
class _Builder:
    """One run of `build`: the stages, each in a method that returns the path of its package."""

    checkpoint: Checkpoint
    out: Path
    options: Options
    quiet: bool
    samples: Path | None = None
    """A text file with which the rounding of weights is corrected."""
    notes: list[str] = field(default_factory=list)
    refusal: SurgeryError | None = None
    """Why no cache can be added to the graph of a whole text; set once that was tried."""

    def build(self) -> Build:
        """Make every stage that is missing, then the folder."""
        (self.out / STAGES).mkdir(parents=True, exist_ok=True)
        (self.out / NAME).unlink(missing_ok=True)
        try:
            model = self.cached_model(self.compressed_package(self.converted_package()))
        except (NotExpressible, PassError, Unsuited) as refusal:
            model = self.build_by_steps(refusal)
        return self.write_folder(model)

    def build_by_steps(self, refusal: SurgeryError) -> Path:
        """Make the stages of a model that reads one token per call, with the cache of transformers.

        Args:
            refusal: why no cache can be added to the graph of a whole text.

        Raises:
            SurgeryError: the refusal, where this fails too.
        """
        if self.refusal is not None or self.needs_more_functions:
            raise refusal
        self.refusal = refusal
        try:
            return self.cached_model(self.compressed_package(self.converted_package()))
        except SurgeryError as error:
            raise refusal from None if error is refusal else error

    @property
    def needs_more_functions(self) -> bool:
        """Whether an option needs functions that a model which reads one token per call has not."""
        return bool(self.options.contexts or self.options.shorter or self.options.width > 1)

    @property
    def key(self) -> str:
        """The record of the first stage: a hash of the versions, the checkpoint and the context."""
        with quiet_host():
            import coremltools
            import torch
            import transformers
        versions = [__version__, *(m.__version__ for m in (coremltools, torch, transformers))]
        own = [self.options.context, *([STEPS] if self.refusal else [])]
        return _hash([versions, self.checkpoint.fingerprint, *own])

    def stage(self, name: str, key: str, make: Callable[[Path], object], suffix: str = ".mlpackage") -> Path:
        """Return a stage's package; make it where it is missing or its record is not `key`."""
        place, record = self.out / STAGES / f"{name}{suffix}", self.out / STAGES / f"{name}.json"
        if not (place.exists() and _read_record(record) == key):
            record.unlink(missing_ok=True)  # before the place changes, or it would speak of another one
            with patched(mb, "name_count", defaultdict(int)):  # names that do not depend on what ran before
                write_atomically(place, make, overwrite=True)
            arrays.write_text(record, json.dumps(key))
        return place

    def converted_package(self) -> Path:
        """Stage 1: the converted checkpoint. Also writes the checkpoint's logits for a short text."""
        reference = self.out / STAGES / "reference.npz"

        def make(place: Path) -> None:
            with scratch_folder(self.out / STAGES) as work, quiet_transformers():
                module = self.checkpoint.module(work)
                step = step_of(module, self.options.context)
                step = step if step and (step.recurrent or self.refusal is not None) else None
                arrays.write(reference, self.reference_logits(module, singly=step is not None), overwrite=True)
                with mapped_constants(work):
                    model = self.traced_model(module, step)
                    loaded = load(model)
                loaded.spec.description.metadata.userDefined.pop(CONVERSION_DATE, None)
                save(loaded, place)

        return self.stage("converted", self.key, make)

    def traced_model(self, module: Any, step: DecoderStep | None) -> Any:
        """Convert the graph of a whole text; or of one token, where the module's cache needs that.

        Raises:
            LoadError: the module cannot be converted.
        """
        if step is not None:
            return convert_step(step)
        if self.refusal is not None:
            raise self.refusal
        return convert(module, self.options.context)

    def reference_logits(self, module: Any, *, singly: bool) -> dict[str, Array]:
        """Return a text, with the checkpoint's logits as it is and with weights rounded to fp16."""
        weights = sum(parameter.numel() for parameter in module.parameters())
        config = module.config.get_text_config()
        text = agreement.compared_text(config, self.options.context, weights, singly=singly)
        logits = logits_of_text(module, text.ids, text.places)
        otherwise = np.array(agreement.counts_positions_otherwise(module, text))
        with agreement.with_rounded_weights(module):
            rounded = text.expected(module)
        stored = {"ids": text.ids, "singly": np.array(singly), "otherwise": otherwise}
        return stored | {"logits": logits, "rounded": rounded}

    def compressed_package(self, model: Path) -> Path:
        """Stage 2: the package with weights of 4 or 8 bits; the same package where none are asked for."""
        if self.options.bits is None:
            return model

        if self.samples is not None:
            return self.calibrated_package(model, self.samples, self.options.bits)

        def make(place: Path) -> None:
            with quiet_host():
                from coremltools.optimize import coreml as host
            settings = read_mode(f"linear-{self.options.bits}").settings
            config = host.OptimizationConfig(host.OpLinearQuantizerConfig(**settings))
            with silent_host():
                made = host.linear_quantize_weights(to_mlmodel(load(model)), config)
            save(load(made), place)

        return self.stage(COMPRESSED, _hash([self.key, self.options.bits]), make)

    def calibrated_package(self, model: Path, samples: Path, bits: int) -> Path:
        """Stage 2 with samples: weights of fewer bits whose rounding is corrected on a text.

        Raises:
            SurgeryError: the text is too short, or the model reads one token per call.
        """
        if is_step(load(model).program):
            raise SurgeryError(
                "samples are read as a whole, and this model reads a token at a time; leave them out"
            )
        rows = samples_of(samples, self.checkpoint.tokenizer(), self.options.context)
        work = self.out / STAGES / "rounding"

        def make(place: Path) -> None:
            inputs = [{TOKENS: row} for row in rows]
            compress(model, bits, inputs=inputs, target=self.options.target, work=work).save(place)

        self.notes.append(f"weights were rounded by {counted(len(rows), 'sample')} of {samples.name}")
        return self.stage(COMPRESSED, _hash([self.key, bits, self.options.target, sha256_of(samples)]), make)

    def unpacked_package(self, model: Path) -> Path:
        """Return a package with the fp16 numbers to which the compressed weights decode, for the check."""

        def make(place: Path) -> None:
            loaded = load(model)
            _decode_weights(loaded.program)
            save(loaded, place)

        return self.stage(UNPACKED, _hash([_read_record(model.with_suffix(".json")), UNPACKED]), make)

    def cached_model(self, model: Path) -> Path:
        """Stages 3 and 4: the package with a cache, or the folder of its chunks."""
        parts = self.chunk_count(model)
        self.note_slow_prompts(model)
        whole = self.package_with_cache(model, parts, self.options.head)
        if parts == 1:
            return whole

        def cut(place: Path) -> None:
            split(whole, parts, compare=False).save(place)

        chunks = self.stage(CHUNKS, _read_record(whole.with_suffix(".json")), cut, "")
        if (more := _weight_bytes(chunks) / _weight_bytes(whole) - 1) > TWICE:
            self.notes.append(
                f"the chunks have {more:.1%} more weights than the whole: weights that several chunks read, "
                "such as a tied table of embeddings, are stored in each"
            )
        return chunks

    def package_with_cache(self, model: Path, parts: int, head: str, name: str = "cached") -> Path:
        """Stage 3: the package with a cache and its functions for prompts and tokens.

        Args:
            model: the package that reads a whole text, or one token.
            parts: how many chunks it will be split into.
            head: "logits" or "argmax".
            name: the name of the stage.
        """
        options, lookup = self.options, self.needs_lookup(parts)
        steps = options.of_functions | {"chunks": parts}
        steps |= {"position_function": {"lookup": True}} if lookup else {}
        steps |= {"fixed_rope": True}  # the checkpoint was traced with no more positions than its config has
        key = _hash([_read_record(model.with_suffix(".json")), options.target, head, steps])

        def make(place: Path) -> None:
            loaded = load(model)
            if is_step(loaded.program):
                step = finished_decoder(
                    loaded, target=options.target, cache=options.cache, joined=parts == 1, lookup=lookup
                )
                _with_head(step, head).save(place)
                return
            surgery = apply(model, _recipe(**steps), target=options.target, prove=None, quiet=self.quiet)
            if options.target and max(Target.parse(options.target).families) <= LAST_FEW_ROWS_FAMILY:
                surgery = apply(surgery.program, SINGLE_ROWS, prove=None, quiet=True)
            one_row = registry.make_pass("select_last_token", position="input")
            surgery = apply(surgery.program, one_row, prove=None, quiet=True)
            _with_head(surgery, head).save(place)

        return self.stage(name, key, make)

    def needs_lookup(self, parts: int) -> bool:
        """Return whether the head shares the embedding table, and is in another chunk or in parts."""
        most: int = vars(registry.make_pass("split_head"))["most"]
        return self.checkpoint.tied and (parts > 1 or self.checkpoint.words > most)

    def note_slow_prompts(self, model: Path) -> None:
        """Note why a model reads one token per call, where it does.

        Raises:
            SurgeryError: it does, and an option needs more functions.
        """
        if not is_step(load(model).program):
            return
        if self.needs_more_functions:
            raise SurgeryError(
                "contexts, shorter and width need a decoder that keeps only keys and values; this one has a "
                "recurrent state, and reads its prompt token by token: leave them out"
            )
        why = "it has a recurrent state"
        if self.refusal is not None:
            why = f"the graph of a whole text gets no cache ({first_line(self.refusal)})"
        self.notes.append(
            f"{why}, and reads prompts token by token: there is no prefill, and each token of a prompt costs "
            "what one of the answer does"
        )

    def chunk_count(self, model: Path) -> int:
        """Return how many chunks the size limit leads to."""
        if self.options.limit is None:
            return 1
        return max(chunk_numbers(load(model).program, self.options.limit).values(), default=0) + 1

    def write_folder(self, model: Path) -> Build:
        """Write the files of the folder, `runner.json` last, and delete the stages."""
        name = CHUNKS if model.name == CHUNKS else MODEL
        for old in (CHUNKS, MODEL, ASSET):
            shutil.rmtree(self.out / old, ignore_errors=True)
        write_atomically(
            self.out / name, lambda place: shutil.copytree(model, place, copy_function=link_or_copy), True
        )
        name, asset = self.convert_format(name)
        names = [name, *filter(None, [asset])]
        for file, text in ((TOKENIZER, self.checkpoint.tokenizer()), (TEMPLATE, self.checkpoint.template)):
            (self.out / file).unlink(missing_ok=True)
            if text:
                names.append(arrays.write_text(self.out / file, text).name)
            elif file == TOKENIZER:
                self.notes.append(
                    "the checkpoint has no tokenizer: `generate` takes token ids, `chat` needs one"
                )
        build = self.compare_logits(self.out / name)
        arrays.write_text(self.out / REPORT, json.dumps(build.to_json(), indent=2) + "\n")
        runner = _runner_of(self.out, name, self.checkpoint, self.options.context, hashes_of(self.out, names))
        runner = replace(runner, asset=asset)
        arrays.write_text(self.out / NAME, runner.text())
        shutil.rmtree(self.out / STAGES)
        return build

    def convert_format(self, name: str) -> tuple[str, str]:
        """Convert the package to the format that was asked for.

        Returns:
            The name of the model, and the name of the .aimodel beside it, or "".

        Raises:
            ProofError: the Core AI model gives other outputs than the Core ML one.
        """
        if self.options.format == CORE_ML:
            return name, ""
        self.notes.append(write_beside(self.out / name).statement)
        if self.options.format == BOTH:
            return name, ASSET
        shutil.rmtree(self.out / name)
        return ASSET, ""

    def compare_logits(self, model: Path) -> Build:
        """Compare the model's logits with the checkpoint's, and return the `Build`.

        Raises:
            SurgeryError: they differ by more than rounding.
        """
        stored = arrays.read(self.out / STAGES / "reference.npz")
        text, expected = agreement.ComparedText(stored["ids"], bool(stored["singly"])), stored["logits"]
        if stored["otherwise"]:
            self.notes.append(
                "by default the checkpoint does not count positions from 0, and the model follows it; generate "
                "of transformers counts from 0, and writes another text"
            )
        rows = text.rows(model, "fp16")
        known = ~np.isneginf(rows) | (self.options.head == HEADS[0])  # an argmax head leaves -inf elsewhere
        psnr = compare_arrays("logits", expected[known], rows[known]).psnr
        with scratch_folder(self.out / STAGES) as work:
            module = partial(self.checkpoint.module, work)
            note = self.judge_model(Judge(text, expected, stored["rounded"], module), model, psnr)
        self.notes += [note] if note else []
        top = float(np.mean(np.argmax(rows, -1) == np.argmax(expected, -1)))
        size = sum(file.stat().st_size for file in model.rglob("*") if file.is_file())
        parts = len(list(model.glob("*.mlpackage"))) if model.name == CHUNKS else 1
        return Build(
            folder=self.out,
            options=self.options,
            bytes=size,
            chunks=parts,
            psnr=psnr,
            top=top,
            off=float(agreement.row_differences(rows, expected).max()),
            placed=self.placements(model),
            notes=tuple(self.notes),
        )

    def judge_model(self, judge: Judge, model: Path, psnr: float) -> str | None:
        """Check that the model is right; return a note for the user, or None.

        A compressed model is built twice more: with the original weights, which must agree with the checkpoint,
        and with the decoded weights, which must agree with the compressed model.

        Raises:
            SurgeryError: the model is wrong.
        """
        exact, bits = judge.text.rows(model, "fp32"), self.options.bits
        if bits is None:
            judge.check_agreement(exact)
            return judge.check_fp16(psnr, model)
        packed = self.out / STAGES / f"{COMPRESSED}.mlpackage"
        parts = self.chunk_count(packed)
        plain = self.package_with_cache(self.converted_package(), parts, HEADS[0], "plain")
        judge.check_agreement(judge.text.rows(plain, "fp32"))
        decoded = self.package_with_cache(self.unpacked_package(packed), parts, HEADS[0], "decoded")
        judge.check_decoded(exact, judge.text.rows(decoded, "fp32"), bits)
        return judge.check_compressed(psnr, bits)

    def placements(self, model: Path) -> dict[str, str]:
        """Return where `decode` and `prefill` run, in words; empty without a target, or for chunks."""
        if self.options.target is None or model.name == CHUNKS:
            return {}
        steps = [n for n in sorted(load(model).program.functions) if not n.endswith(INPUTS)]
        inspections = {n: inspect(model, target=self.options.target, function=n) for n in steps}
        return {
            name: f"{inspection.residency['ops']:.1%} of the ops expected on the ANE of {self.options.target}, "
            f"{counted(len(inspection.segments), 'segment')}"
            for name, inspection in inspections.items()
        }


def _recipe(**options: Any) -> Recipe:
    """Return the recipe of a build."""
    recipe: Recipe = registry.recipe_module("llm_ane").llm_ane
    return recipe.with_options(**options)


def _decode_weights(program: Program) -> None:
    """Replace compressed weights by constants of the numbers to which they decode."""
    for block in blocks(program):
        weights = [(op, v) for op in list(block.operations) for v in op.outputs if is_compressed(v)]
        for op, weight in weights:
            if all(is_constexpr(reader) for reader in weight.child_ops):
                continue
            with block:
                plain = mb.const(val=decoded(weight), name=f"{weight.name}_decoded", before_op=op)
            replace_uses(block, anchor_op=op, old_var=weight, new_var=plain, force_replace=True)


def _with_head(surgery: Surgery, head: str) -> Surgery:
    """Return the model with the head that was asked for: logits, or the likeliest tokens in their place."""
    if head == HEADS[0]:
        return surgery
    parts = registry.make_pass("pick_tokens", each_part=True, output=LOGITS)
    return apply(surgery.program, parts, prove=None, quiet=True)


def _weight_bytes(place: Path) -> int:
    """Return the bytes of all weight files in a folder."""
    return sum(file.stat().st_size for file in place.rglob("weight.bin"))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read_record(record: Path) -> Any:
    """Return what a stage was made from; None where the record cannot be read."""
    try:
        return json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


# Samples of text for a model that reads a fixed number of tokens.

MOST, LEAST = 64, 2
"""The most samples, as more cost time and change little; and the least, of which one is held out."""


def samples_of(file: Path, tokenizer: str, context: int) -> list[Array]:
    """Return the tokens of a text file in rows of `context` tokens; the last, incomplete row is left out.

    Args:
        file: a text file in UTF-8.
        tokenizer: the JSON of a tokenizer of the tokenizers library.
        context: tokens in a row.

    Returns:
        At most `MOST` rows, spread evenly over the file: (1, context), int32.

    Raises:
        LoadError: the file cannot be read.
        SurgeryError: there is no tokenizer, or the text fills too few rows.
    """
    from tokenizers import Tokenizer

    if not tokenizer:
        raise SurgeryError("samples are texts, and the checkpoint has no tokenizer to read them with")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{file} cannot be read as text: {error}") from error
    ids = Tokenizer.from_str(tokenizer).encode(text).ids
    count = len(ids) // context
    if count < LEAST:
        raise SurgeryError(
            f"{file} holds {len(ids)} tokens, and a sample is {context} of them, the context; give a text of "
            f"{LEAST * context} tokens at least, some dozens of times the context if you can"
        )
    rows = np.array(ids[: count * context], np.int32).reshape(count, 1, context)
    return list(rows[np.linspace(0, count - 1, min(count, MOST)).astype(int)])
