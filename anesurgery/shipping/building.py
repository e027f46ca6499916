"""Build a folder that writes text from a checkpoint of Hugging Face.

A build has stages: the checkpoint is converted, its weights are compressed, it gets a cache, and is cut into
chunks. Each is kept in `stages/` with a record of all that it was made from, so that a build that was stopped
goes on after the last one that is whole; `runner.json` is written last.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery import __version__, registry
from anesurgery.byte_counts import read_size
from anesurgery.checking.grades import compare_arrays
from anesurgery.compressing.compression import compress
from anesurgery.compressing.modes import read_mode
from anesurgery.display import Drawn
from anesurgery.doors import door
from anesurgery.errors import LoadError, NotExpressible, PassError, SurgeryError, Unsuited
from anesurgery.files import arrays
from anesurgery.files.package import Loaded, save, to_mlmodel
from anesurgery.files.runner_file import NAME, Runner, hashes_of, sha256_of
from anesurgery.files.writing import check_place, scratch_folder, write_atomically
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
    static_shape,
    types,
)
from anesurgery.placement.cost import LAST_FEW_ROWS_FAMILY
from anesurgery.placement.inspector import inspect
from anesurgery.placement.target import Target
from anesurgery.regions.compressed_weights import decoded
from anesurgery.rewriting.both_formats import BOTH, CORE_ML, check_format, write_beside
from anesurgery.shipping import agreement
from anesurgery.shipping.agreement import ALIKE, SLACK, Text, logits_of
from anesurgery.shipping.checkpoint import Checkpoint, silent
from anesurgery.shipping.converting import LOGITS, TOKENS, convert
from anesurgery.shipping.mapped_weights import mapped_constants
from anesurgery.shipping.recurrent_states import Step, convert_step, finished_step, is_step, step_of
from anesurgery.splitting.cuts import chunk_numbers
from anesurgery.splitting.split import split
from anesurgery.surgery import Recipe, Surgery, apply

SINGLE_ROWS = "pointwise_convolution"
"""The pass for products of one row, which were seen on the CPU at each width up to the A14 and the M1
(`cost.LAST_FEW_ROWS_FAMILY`)."""
STAGES, REPORT, STEPS = "stages", "report.json", "steps"
COMPRESSED, UNPACKED = "compressed", "unpacked"
MODEL, ASSET, CHUNKS = "model.mlpackage", "model.aimodel", "chunks"
TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
USUAL = 2048
"""The context where none is asked for, or less where the checkpoint was made for less."""
DATED = "com.github.apple.coremltools.conversion_date"
"""Left out, so that the same checkpoint is built to the same bytes."""
BITS = (4, 8)
HEADS = ("logits", "argmax")
TWICE = 0.01
"""Of all weights: what chunks may hold more than once without a word."""


@dataclass(frozen=True)
class Options:
    """What a build was asked for."""

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
    """The name of the file."""
    format: str = CORE_ML


@dataclass(frozen=True)
class Build(Drawn):
    """A folder that was built, with its figures."""

    folder: Path
    """That can be copied or shipped as it is."""
    options: Options
    """With which it was built."""
    bytes: int
    """Of the model's files."""
    chunks: int
    """Packages that run one after the other; 1 where the model is not cut."""
    psnr: float
    """Of its logits beside those of the checkpoint, in dB."""
    top: float
    """Share of tokens after which both take the same one as the likeliest."""
    off: float
    """How far a logit is from that of the checkpoint, at most, by the range of all."""
    placed: Mapping[str, str] = field(default_factory=dict)
    """Function -> where it runs, where a target was named."""
    notes: tuple[str, ...] = ()
    """What the reader must know."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, the same wherever the folder lies; rounded, as sums depend on the processor."""
        found = asdict(self) | {
            "psnr": round(self.psnr, 1),
            "top": round(self.top, 3),
            "off": float(f"{self.off:.1e}"),
            "notes": list(self.notes),
        }
        return {name: value for name, value in found.items() if name != "folder"}


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
        out: the folder to make. One in which a build was stopped goes on.
        context: the most tokens of prompt and answer together. Default: 2048, or what the model was made for.
        target: chip and OS, as "M4/macOS 15".
        bits: 4 or 8 bits for each weight, with one scale for each output channel. Default: fp16.
        limit: the most weights of a chunk, as "900 MB". Default: one package.
        prefill: tokens of the prompt that are read at once.
        cache: where keys and values are kept: "state" or "io".
        contexts: smaller contexts that get functions of their own. They share the weights and the cache; a
            runner takes the smallest that fits.
        shorter: shorter prefills that get functions of their own. They serve short prompts and what is left of
            long ones.
        width: tokens that a step reads; the last one is new. Use more than 1 for engines on which queries of
            few positions fail.
        head: "logits" of all tokens, or "argmax": the likeliest token of each part of the vocabulary. With the
            latter, which comes with its logit, nothing can be sampled.
        samples: with `bits`: a text file like the model's own output, which corrects the rounding of weights
            (`compress`).
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
    functions = {"contexts": tuple(contexts), "shorter": tuple(shorter), "width": width}
    if head not in HEADS:
        raise SurgeryError(f"head={head!r}; it may be {' or '.join(map(repr, HEADS))}")
    options = _options(checkpoint, context, target, bits, limit, prefill, cache, functions)
    text = None if samples is None else Path(samples).expanduser().absolute()
    if text is not None and bits is None:
        raise SurgeryError("samples say how weights are rounded to fewer bits; give bits=4 or 8 too")
    if check_format(format) != CORE_ML:
        registry.writer_of(Path(ASSET))
        if limit is not None:
            raise SurgeryError(f"format={format!r}: a Core AI model is one file; leave limit out")
    options = replace(options, head=head, samples=None if text is None else text.name, format=format)
    _check_out(place, overwrite)
    return _Builder(checkpoint, place, options, quiet, text).build()


def _options(
    checkpoint: Checkpoint,
    context: int | None,
    target: Target | str | None,
    bits: int | None,
    limit: str | None,
    prefill: int,
    cache: str,
    functions: Mapping[str, Any],
) -> Options:
    """The options, with what follows from the checkpoint.

    Raises:
        SurgeryError: one cannot be what it is.
    """
    most = checkpoint.positions
    context = min(USUAL, most or USUAL) if context is None else context
    if context < 2:
        raise SurgeryError(f"context={context}; it must be 2 or more")
    if most is not None and context > most:
        raise SurgeryError(f"context={context}; the checkpoint was made for {most} positions at most")
    if bits is not None and bits not in BITS:
        raise SurgeryError(f"bits={bits}; it may be {' or '.join(map(str, BITS))}")
    if limit is not None:
        read_size(limit)
    _steps(context=context, prefill=prefill, cache=cache, **functions)  # says what it does not take
    if (largest := max(functions["contexts"], default=0)) >= context:
        raise SurgeryError(f"contexts: {largest} is no smaller context than that of {context} tokens")
    chip = None if target is None else str(Target.parse(target))
    return Options(context, chip, bits, limit, prefill, cache, **functions)


def _check_out(place: Path, overwrite: bool) -> None:
    """See that a build may be made there.

    Raises:
        LoadError: it may not.
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
    """One build."""

    checkpoint: Checkpoint
    out: Path
    options: Options
    quiet: bool
    samples: Path | None = None
    """A text by which weights are rounded."""
    notes: list[str] = field(default_factory=list)
    refusal: SurgeryError | None = None
    """Why no cache is added to the graph of a whole text, where that was tried."""

    def build(self) -> Build:
        """Every stage that is not there yet, and the folder from the last one."""
        (self.out / STAGES).mkdir(parents=True, exist_ok=True)
        (self.out / NAME).unlink(missing_ok=True)
        try:
            model = self.cached(self.compressed(self.converted()))
        except (NotExpressible, PassError, Unsuited) as refusal:
            model = self.by_steps(refusal)
        return self.finished(model)

    def by_steps(self, refusal: SurgeryError) -> Path:
        """The package that reads a token at a time with the cache of transformers.

        Args:
            refusal: why the graph of a whole text gets no cache.

        Raises:
            SurgeryError: the refusal, where this does not help either.
        """
        if self.refusal is not None or self.several:
            raise refusal
        self.refusal = refusal
        try:
            return self.cached(self.compressed(self.converted()))
        except SurgeryError as error:
            raise refusal from error

    @property
    def several(self) -> bool:
        """Is it asked for functions that a model which reads a token at a time has not?"""
        return bool(self.options.contexts or self.options.shorter or self.options.width > 1)

    @property
    def key(self) -> str:
        """Of the checkpoint and of what converts it."""
        with quiet_host():
            import coremltools
            import torch
            import transformers
        versions = [__version__, *(m.__version__ for m in (coremltools, torch, transformers))]
        own = [self.options.context, *([STEPS] if self.refusal else [])]
        return _hash([versions, self.checkpoint.fingerprint, *own])

    def stage(self, name: str, key: str, make: Callable[[Path], object], suffix: str = ".mlpackage") -> Path:
        """The result of a stage, made where it is not there yet or was made from something else."""
        place, record = self.out / STAGES / f"{name}{suffix}", self.out / STAGES / f"{name}.json"
        if not (place.exists() and _read(record) == key):
            record.unlink(missing_ok=True)  # before the place changes, or it would speak of another one
            with patched(mb, "name_count", defaultdict(int)):  # names that do not depend on what ran before
                write_atomically(place, make, overwrite=True)
            arrays.write_text(record, json.dumps(key))
        return place

    def converted(self) -> Path:
        """The checkpoint as a package, with the logits that it gives for a few tokens."""
        reference = self.out / STAGES / "reference.npz"

        def make(place: Path) -> None:
            with scratch_folder(self.out / STAGES) as work, silent():
                module = self.checkpoint.module(work)
                step = step_of(module, self.options.context)
                step = step if step and (step.recurrent or self.refusal is not None) else None
                arrays.write(reference, self.reference(module, singly=step is not None), overwrite=True)
                with mapped_constants(work):
                    model = self.traced(module, step)
                    loaded = _read_stage(model)
                loaded.spec.description.metadata.userDefined.pop(DATED, None)
                save(loaded, place)

        return self.stage("converted", self.key, make)

    def traced(self, module: Any, step: Step | None) -> Any:
        """The graph of a whole text; or of a token, where more than keys and values is kept, or it must be.

        Raises:
            LoadError: it cannot be converted.
        """
        if step is not None:
            return convert_step(step)
        if self.refusal is not None:
            raise self.refusal
        return convert(module, self.options.context)

    def reference(self, module: Any, *, singly: bool) -> dict[str, Array]:
        """A text, and what the checkpoint gives for it: as it is, and with its weights rounded to fp16."""
        weights = sum(parameter.numel() for parameter in module.parameters())
        config = module.config.get_text_config()
        of = agreement.text(config, self.options.context, weights, singly=singly)
        rows = {"ids": of.ids, "singly": np.array(singly), "logits": logits_of(module, of.ids, of.places)}
        rows["otherwise"] = np.array(agreement.counts_otherwise(module, of))
        with agreement.rounded(module):
            return rows | {"rounded": of.expected(module)}

    def compressed(self, model: Path) -> Path:
        """The package with weights of fewer bits."""
        if self.options.bits is None:
            return model

        if self.samples is not None:
            return self.calibrated(model, self.samples, self.options.bits)

        def make(place: Path) -> None:
            with quiet_host():
                from coremltools.optimize import coreml as host
            settings = read_mode(f"linear-{self.options.bits}").settings
            config = host.OptimizationConfig(host.OpLinearQuantizerConfig(**settings))
            with quiet_host(), redirect_stderr(io.StringIO()):  # coremltools' progress bars
                made = host.linear_quantize_weights(to_mlmodel(_read_stage(model)), config)
            save(_read_stage(made), place)

        return self.stage(COMPRESSED, _hash([self.key, self.options.bits]), make)

    def calibrated(self, model: Path, samples: Path, bits: int) -> Path:
        """The package with weights of fewer bits, each corrected for what a text makes of it.

        Raises:
            SurgeryError: the text is too short, or the model reads a token at a time.
        """
        if is_step(_read_stage(model).program):
            raise SurgeryError(
                "samples are read as a whole, and this model reads a token at a time; leave them out"
            )
        rows = samples_of(samples, self.checkpoint.tokenizer(), self.options.context)
        work = self.out / STAGES / "rounding"

        def make(place: Path) -> None:
            inputs = [{TOKENS: row} for row in rows]
            compress(model, bits, inputs=inputs, target=self.options.target, work=work).save(place)

        self.notes.append(f"weights were rounded by {len(rows)} samples of {samples.name}")
        return self.stage(COMPRESSED, _hash([self.key, bits, self.options.target, sha256_of(samples)]), make)

    def unpacked(self, model: Path) -> Path:
        """A package with compressed weights, with those in fp16 that they decode to."""

        def make(place: Path) -> None:
            loaded = _read_stage(model)
            _decode(loaded.program)
            save(loaded, place)

        return self.stage(UNPACKED, _hash([_read(model.with_suffix(".json")), UNPACKED]), make)

    def cached(self, model: Path) -> Path:
        """The package with functions that keep keys and values; or a folder of its chunks."""
        parts = self.parts(model)
        self.stepped(model)
        whole = self.whole(model, parts, self.options.head)
        if parts == 1:
            return whole

        def cut(place: Path) -> None:
            split(whole, parts, compare=False).save(place)

        chunks = self.stage(CHUNKS, _read(whole.with_suffix(".json")), cut, "")
        if (more := _weights(chunks) / _weights(whole) - 1) > TWICE:
            self.notes.append(
                f"the chunks have {more:.1%} more weights than the whole: weights that several chunks read, "
                "such as a tied table of embeddings, are stored in each"
            )
        return chunks

    def whole(self, model: Path, parts: int, head: str, name: str = "cached") -> Path:
        """A package with functions that keep keys and values, so that it can be cut into parts.

        Args:
            model: that reads a whole text, or a token.
            parts: how many it will be cut into.
            head: "logits" or "argmax".
            name: of the stage.
        """
        own = self.options
        steps: dict[str, Any] = {"context": own.context, "prefill": own.prefill, "cache": own.cache}
        steps |= {"chunks": parts, "contexts": own.contexts, "shorter": own.shorter, "width": own.width}
        once = self.tied_apart(parts)
        steps |= {"position_function": {"lookup": True}} if once else {}
        steps |= {"fixed_rope": True}  # the checkpoint was traced with no more positions than its config has
        key = _hash([_read(model.with_suffix(".json")), own.target, head, steps])

        def make(place: Path) -> None:
            loaded = _read_stage(model)
            if is_step(loaded.program):
                joined = parts == 1
                step = finished_step(loaded, target=own.target, cache=own.cache, joined=joined, lookup=once)
                _picked(step, head).save(place)
                return
            surgery = apply(model, _steps(**steps), target=own.target, prove=None, quiet=self.quiet)
            if own.target is not None and max(Target.parse(own.target).families) <= LAST_FEW_ROWS_FAMILY:
                surgery = apply(surgery.program, SINGLE_ROWS, prove=None, quiet=True)
            one_row = registry.make_pass("select_last_token", position="input")
            surgery = apply(surgery.program, one_row, prove=None, quiet=True)
            _picked(surgery, head).save(place)

        return self.stage(name, key, make)

    def tied_apart(self, parts: int) -> bool:
        """Does the head read the table of embeddings, and stand in another chunk, or in parts?"""
        most: int = vars(registry.make_pass("split_head"))["most"]
        return self.checkpoint.tied and (parts > 1 or self.checkpoint.words > most)

    def stepped(self, model: Path) -> None:
        """Say why a model reads a token at a time, where it does.

        Raises:
            SurgeryError: it does, and an option needs functions that it has not.
        """
        if not is_step(_read_stage(model).program):
            return
        if self.several:
            raise SurgeryError(
                "contexts, shorter and width need a decoder that keeps only keys and values; this one has a "
                "recurrent state, and reads its prompt token by token: leave them out"
            )
        why = "it has a recurrent state"
        if self.refusal is not None:
            why = f"the graph of a whole text gets no cache ({_first_line(self.refusal)})"
        self.notes.append(
            f"{why}, and reads prompts token by token: there is no prefill, and each token of a prompt costs "
            "what one of the answer does"
        )

    def parts(self, model: Path) -> int:
        """How many chunks there will be."""
        if self.options.limit is None:
            return 1
        return max(chunk_numbers(_read_stage(model).program, self.options.limit).values(), default=0) + 1

    def finished(self, model: Path) -> Build:
        """The files of the folder, `runner.json` last; the stages are gone then."""
        name = CHUNKS if model.name == CHUNKS else MODEL
        for old in (CHUNKS, MODEL, ASSET):
            shutil.rmtree(self.out / old, ignore_errors=True)
        write_atomically(
            self.out / name, lambda place: shutil.copytree(model, place, copy_function=_linked), True
        )
        name, asset = self.formatted(name)
        names = [name, *filter(None, [asset])]
        for file, text in ((TOKENIZER, self.checkpoint.tokenizer()), (TEMPLATE, self.checkpoint.template)):
            (self.out / file).unlink(missing_ok=True)
            if text:
                names.append(arrays.write_text(self.out / file, text).name)
            elif file == TOKENIZER:
                self.notes.append(
                    "the checkpoint has no tokenizer: `generate` takes token ids, `chat` needs one"
                )
        found = self.compared(self.out / name)
        arrays.write_text(self.out / REPORT, json.dumps(found.to_json(), indent=2) + "\n")
        runner = runner_of(self.out, name, self.checkpoint, self.options.context, hashes_of(self.out, names))
        runner = replace(runner, asset=asset)
        arrays.write_text(self.out / NAME, runner.text())
        shutil.rmtree(self.out / STAGES)
        return found

    def formatted(self, name: str) -> tuple[str, str]:
        """The model in the format that was asked for, and its Core AI form beside it, or "".

        Raises:
            ProofError: the two forms do not agree.
        """
        if self.options.format == CORE_ML:
            return name, ""
        self.notes.append(write_beside(self.out / name).statement)
        if self.options.format == BOTH:
            return name, ASSET
        shutil.rmtree(self.out / name)
        return ASSET, ""

    def compared(self, model: Path) -> Build:
        """What is known of the model, its logits beside those of the checkpoint.

        Raises:
            SurgeryError: they are not the same up to the rounding of what is stored and computed.
        """
        stored = arrays.read(self.out / STAGES / "reference.npz")
        of, wanted = agreement.Text(stored["ids"], bool(stored["singly"])), stored["logits"]
        if stored["otherwise"]:
            self.notes.append(
                "by default the checkpoint does not count positions from 0, and the model follows it; generate "
                "of transformers counts from 0, and writes another text"
            )
        rows = of.rows(model, "fp16")
        told = ~np.isneginf(rows) | (self.options.head == HEADS[0])
        psnr = compare_arrays("logits", wanted[told], rows[told]).psnr
        with scratch_folder(self.out / STAGES) as work:
            module = partial(self.checkpoint.module, work)
            note = self.judged(Judge(of, wanted, stored["rounded"], module), model, psnr)
        self.notes += [note] if note else []
        top = float(np.mean(np.argmax(rows, -1) == np.argmax(wanted, -1)))
        size = sum(file.stat().st_size for file in model.rglob("*") if file.is_file())
        parts = len(list(model.glob("*.mlpackage"))) if model.name == CHUNKS else 1
        return Build(
            folder=self.out,
            options=self.options,
            bytes=size,
            chunks=parts,
            psnr=psnr,
            top=top,
            off=float(agreement.off(rows, wanted).max()),
            placed=self.placed(model),
            notes=tuple(self.notes),
        )

    def judged(self, judge: Judge, model: Path, psnr: float) -> str | None:
        """See that the model is right, and what there is to say of it.

        With weights of fewer bits it is made twice more: with the weights as they were, which must agree with
        the checkpoint, and with the numbers to which the compressed ones decode.

        Raises:
            SurgeryError: it is not.
        """
        exact, bits = judge.of.rows(model, "fp32"), self.options.bits
        if bits is None:
            judge.agrees(exact)
            return judge.rounds(psnr, model)
        packed = self.out / STAGES / f"{COMPRESSED}.mlpackage"
        parts = self.parts(packed)
        plain = self.whole(self.converted(), parts, HEADS[0], "plain")
        judge.agrees(judge.of.rows(plain, "fp32"))
        decoded = self.whole(self.unpacked(packed), parts, HEADS[0], "decoded")
        judge.keeps(exact, judge.of.rows(decoded, "fp32"), bits)
        return judge.loses(psnr, bits)

    def placed(self, model: Path) -> dict[str, str]:
        """Where `decode` and `prefill` run."""
        if self.options.target is None or model.name == CHUNKS:
            return {}
        steps = [n for n in sorted(_read_stage(model).program.functions) if not n.endswith(INPUTS)]
        found = {n: inspect(model, target=self.options.target, function=n) for n in steps}
        return {
            name: f"{one.residency['ops']:.1%} of the ops expected on the ANE of {self.options.target}, "
            f"{len(one.segments)} segments"
            for name, one in found.items()
        }


def _steps(**options: Any) -> Recipe:
    """The recipe of a build.

    Raises:
        SurgeryError: an option cannot be what it is.
    """
    recipe: Recipe = registry.recipe_module("llm_ane").llm_ane
    return recipe.with_options(**options)


def _decode(program: Program) -> None:
    """Let the ops of a program read the numbers to which its compressed weights decode."""
    for block in blocks(program):
        weights = [(op, v) for op in list(block.operations) for v in op.outputs if is_compressed(v)]
        for op, weight in weights:
            if all(is_constexpr(reader) for reader in weight.child_ops):
                continue
            with block:
                plain = mb.const(val=decoded(weight), name=f"{weight.name}_decoded", before_op=op)
            replace_uses(block, anchor_op=op, old_var=weight, new_var=plain, force_replace=True)


def _picked(surgery: Surgery, head: str) -> Surgery:
    """A model with the likeliest tokens in place of logits, where they are asked for."""
    if head == HEADS[0]:
        return surgery
    parts = registry.make_pass("pick_tokens", each_part=True, output=LOGITS)
    return apply(surgery.program, parts, prove=None, quiet=True)


def _read_stage(model: Any) -> Loaded:
    """What a stage left, or a host made."""
    return load(model)


def _weights(place: Path) -> int:
    """Bytes of all weights in a folder."""
    return sum(file.stat().st_size for file in place.rglob("weight.bin"))


def _linked(source: str, target: str) -> None:
    """The same file once more, or a copy where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read(record: Path) -> Any:
    """What a stage was made from; None where that is not known."""
    try:
        return json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


# Texts as samples for a model that reads a fixed number of tokens.

MOST, LEAST = 64, 2
"""Samples: more take their time and change little; of one none could be held out."""


def samples_of(file: Path, tokenizer: str, context: int) -> list[Array]:
    """The tokens of a file, in rows as long as the context; the last ones, which fill no row, are left out.

    Args:
        file: of text in UTF-8.
        tokenizer: as the text of a file of the tokenizers library.
        context: tokens in a row.

    Returns:
        `MOST` rows at most, from the whole length of the file: (1, context), int32.

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


# What a runner must know of a built model, read from the model itself.


def runner_of(folder: Path, model: str, checkpoint: Checkpoint, most: int, hashes: dict[str, str]) -> Runner:
    """The `runner.json` of a folder.

    Args:
        folder: with the model.
        model: the package or the folder of chunks in it.
        checkpoint: that it was built from.
        most: tokens of a text; a recurrent state has no end of its own.
        hashes: of the files of the folder.
    """
    decoder = Decoder(folder / model)
    call = decoder.calls[-1]
    manifest = folder / model / "chain.json"
    names = json.loads(manifest.read_text(encoding="utf-8"))["models"] if manifest.is_file() else []
    return Runner(
        model,
        tuple(f"{model}/{name}" for name in names) or (model,),
        functions(folder / model, decoder, most),
        call.tokens,
        call.output,
        min(decoder.context, most),
        {},
        "tokenizer.json" if "tokenizer.json" in hashes else "",
        "chat_template.jinja" if "chat_template.jinja" in hashes else "",
        checkpoint.special,
        checkpoint.ends,
        {} if call.greedy else checkpoint.sampling,
        hashes,
        call.values,
    )


def functions(model: Path, decoder: Decoder, most: int) -> dict[str, Any]:
    """What each function of a model reads and gives."""
    contexts = {call.name: min(call.context, most) for call in decoder.calls}
    pickers = {call.name: call.picker for call in decoder.calls}
    whole = Predictor(model)
    names = whole.functions
    found = {}
    for name in names:
        given, made = Predictor(whole, function=name).ports
        states = {n: v for n, v in given.items() if types.is_state(v.sym_type)}
        inputs = {n: v for n, v in given.items() if n not in states}
        maker = f"{name}{INPUTS}" if f"{name}{INPUTS}" in names else ""
        found[name] = {
            "inputs": _ports(inputs),
            "outputs": _ports(made),
            "states": {n: _state(v) for n, v in states.items()},
            "inputs_from": maker,
            "chunks": [i for i, part in enumerate(whole.parts) if name in part.program.functions],
            "context": contexts.get(name.removesuffix(INPUTS), most),
            "picks": pickers.get(name, ""),
            "units": "cpuOnly" if name.endswith(INPUTS) else "cpuAndNeuralEngine",
        }
    return found


def _ports(values: Mapping[str, Var]) -> dict[str, Any]:
    return {n: {"shape": list(static_shape(v) or ()), "dtype": dtype_name(v)} for n, v in values.items()}


def _state(state: Var) -> dict[str, Any]:
    held = state.sym_type.wrapped_type()
    return {"shape": [int(d) for d in held.get_shape()], "dtype": types.builtin_to_string(held.get_primitive())}


# Whether a model may be handed over, by its logits (`agreement`): refuse it, or say what it loses.

AGREE = 30.0
"""PSNR in dB below which logits of a model that was not compressed are no rounding: fp16 leaves 50 and more."""


@dataclass(frozen=True)
class Judge:
    """What a checkpoint gives for a text, and the checkpoint itself."""

    of: Text
    wanted: Array
    """Its logits."""
    rounded: Array
    """The same with its weights rounded to fp16."""
    module: Callable[[], Any]
    """Gives the checkpoint as a module of transformers, where that is needed."""

    def agrees(self, rows: Array) -> None:
        """See that a model computes what the checkpoint does, but for the rounding of its weights.

        Args:
            rows: of the model, computed in fp32.

        Raises:
            SurgeryError: it does not.
        """
        far = agreement.unexplained(rows, self.of, self.rounded, self.module)
        if far:
            place, most = max(far.items(), key=lambda one: one[1])
            count = len(self.of.ids)
            raise SurgeryError(
                f"the model gives other logits than the checkpoint after {len(far)} of {count} tokens, "
                f"and not by rounding: computed in fp32, beside weights that are rounded to fp16, they are "
                f"{most:.1%} of their range apart after token {place + 1}; this is a defect of the conversion"
            )

    def keeps(self, rows: Array, decoded: Array, bits: int) -> None:
        """See that compressed weights give what the numbers give to which they decode.

        Args:
            rows: of the model with compressed weights, computed in fp32.
            decoded: of the model that was made in the same way from these numbers.
            bits: of a weight.

        Raises:
            SurgeryError: they do not.
        """
        far = agreement.off(rows, decoded)
        if not np.all(far < ALIKE):
            raise SurgeryError(
                f"weights of {bits} bits give other logits than the numbers to which they decode: computed in "
                f"fp32, they are {far.max():.1%} of their range apart after token "
                f"{int(self.of.places[np.argmax(far)]) + 1}; this is a defect of the build"
            )

    def rounds(self, psnr: float, model: Path) -> str | None:
        """See that a model computed in fp16 is no further from the checkpoint than rounding leads.

        Args:
            psnr: of its logits, in dB.
            model: where it lies.

        Returns:
            A note where rounding leads far.

        Raises:
            SurgeryError: it is further.
        """
        if psnr >= AGREE:
            return None
        noise = agreement.noise(self.of, self.wanted, self.module())
        if not psnr >= noise - SLACK:
            raise SurgeryError(
                f"the model gives other logits than the checkpoint in fp16 arithmetic: {psnr:.1f} dB for "
                f"{len(self.of.ids)} tokens, where numbers of the checkpoint that are moved by a rounding give "
                f"{noise:.1f} dB; look for values beyond fp16 with `anesurgery.ranges` on {model}"
            )
        return (
            f"fp16 is coarse for this checkpoint: its own logits are {noise:.1f} dB from themselves where its "
            "numbers move by a rounding, as where other experts are chosen next to a threshold"
        )

    def loses(self, psnr: float, bits: int) -> str:
        """See that compressed weights lead no further from the checkpoint than its own, rounded to the nearest.

        Args:
            psnr: of the model's logits, in dB.
            bits: of a weight.

        Returns:
            A note with both.

        Raises:
            SurgeryError: they lead further, by more than twice.
        """
        usual = agreement.nearest(self.of, self.wanted, self.module(), bits)
        if not psnr >= usual - SLACK:
            raise SurgeryError(
                f"weights of {bits} bits lose more than they must: the logits are {psnr:.1f} dB from those of "
                f"the checkpoint, where its own weights, rounded to the nearest, lead to {usual:.1f} dB; give "
                "more bits, or none"
            )
        return (
            f"weights of {bits} bits change the logits: {psnr:.1f} dB beside those of the checkpoint, where "
            f"its own weights, rounded to the nearest, lead to {usual:.1f} dB"
        )
