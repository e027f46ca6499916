"""Turn a decoder that reads all its tokens at once into two functions that keep keys and values in a cache.

`prefill` reads the prompt, 64 tokens a call, and `decode` reads one token; both share every weight. The input
`position` is the number of tokens that came before. Each attention writes its keys and values into the cache at
that position: after rotation, and before heads are repeated. Constants with one row per token (learned
positions, cosines and sines, masks, attention biases) are sliced at the position when the model runs. A matrix
that depends on distances only, such as a causal mask, is one slice of its diagonals. Attention with a sliding
window keeps a ring, if that is shorter than the context: the window and one call of `prefill`, in a state of
its own. `windows="mask"` keeps the whole context and the mask instead, for targets on which two states may
fail.

`writes="blend"` updates the cache without a slice: the old cache times 0 at the new tokens, plus the new rows
placed by a product with one-hot rows. Each number is a sum with one non-zero term, so it is exact. The cache is
then read once and written once, and only masks and tables need the position (`position_function`).

`cache="state"` keeps the cache in states, one for each shape. `cache="io"` uses inputs `cache_0`, ... and
outputs `cache_0_out`, ..., which the caller hands to the next call. `context` is the largest number of tokens,
by default as many as the model reads. `shorter` adds prefills of fewer tokens. `width` is the number of tokens
that `decode` reads, of which the last is new: some engines fail on one or two queries and run four. `contexts`
adds functions for smaller contexts (`prefill_256`, `decode_256`): they share all weights and read the first
rows of the same cache, and `generate` calls the smallest that fits. `fixed` first turns other inputs into
constants: `{"attention_mask": 1}`. Inputs with one row per position, such as cosines and sines, stay inputs and
hold the rows of one call. Call `prefill` and `decode` in any order, or let `anesurgery.generate` do it. A model
that `anesurgery.split` will cut needs a state for each chunk: `chunks=4`, by weights `chunks="950 MB"`, or
`chunks="target"` for the limit of the target.

Refuses when an attention is not causal or an op mixes tokens in another way, when the input of the tokens
cannot be told, and when the model is older than iOS 18. It also refuses rotary frequencies that may belong to
one text length only ("dynamic", and both sets of a longrope): in a converted model they are a fixed table, and
shorter texts may need another one. With `fixed_rope=True` you promise that they hold for every length.

Why it helps: without a cache each new token costs a pass over all tokens. A state that is read, updated by
`slice_update` and written back stays on the ANE; one state does on every chip that was seen, two fail on
M-series with macOS 26.0.1 (reported: CoreML-LLM).

Grade: none: the interface changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Pass, Program, Refusal, Session, Var, mb
from anesurgery.interpret.decoding import replay
from anesurgery.passes.add_cache import token_inputs
from anesurgery.passes.add_cache.cached_function import CacheOptions, CallSize, cached_functions
from anesurgery.placement.rules import loading
from anesurgery.rewriting.passes import against_several
from anesurgery.splitting.cuts import chunk_numbers


def _are_integers(values: Any) -> bool:
    """Return whether values are a list or tuple of integers."""
    return isinstance(values, (list, tuple)) and all(type(value) is int for value in values)


@dataclass(frozen=True)
class AddCache(Pass):
    """Two functions, `prefill` and `decode`, that keep keys and values."""

    name = "add_cache"
    essential = True
    follows = (
        *("fold_constants", "gather_to_moves", "token_id_guard", "causal_mask_tensor"),
        *("split_head", "compute_fp16", "rotary_tables", "embedding_matmul"),
    )
    context: int | None = an.option(None, least=1)
    """The most tokens that are kept; all that the model reads by default."""
    contexts: tuple[int, ...] = ()
    """Smaller contexts, each with functions of its own over the same weights and the same cache."""
    prefill: int = an.option(64, least=1)
    """Tokens in a call of `prefill`; the context, where that is less."""
    shorter: tuple[int, ...] = ()
    """Shorter prefills, as `prefill16`: for short prompts, and for what is left of long ones."""
    width: int = an.option(1, least=1)
    """Tokens in a call of `decode`: more than the one that is new are read again."""
    cache: str = an.option("state", among=("state", "io"))
    """Where keys and values are kept: "state" or "io"."""
    windows: str | None = an.option(None, among=("ring", "mask"))
    """How sliding windows are kept: "ring" or "mask"; rings by default, where the target takes their states."""
    writes: str = an.option("slice", among=("slice", "blend"))
    """How what is new is kept: "slice", by `slice_update`, or "blend", by products with one-hot rows."""
    fixed: Mapping[str, Any] | None = None
    """Inputs that become constants, with the value of all their elements, or an array."""
    chunks: int | str = 1
    """The number of chunks it will be cut into; or the most weights of one, as "950 MB"; or "target"."""
    fixed_rope: bool = False
    """Whether you say that the frequencies of rotary positions hold for texts of every length."""
    required: bool = False
    """Whether it is an error if no cache can be added."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _are_integers(self.shorter) or not all(self.width < n < self.prefill for n in self.shorter):
            raise an.PassError(
                f"{self.name}: shorter={self.shorter!r}; each must be longer than decode, which reads "
                f"{self.width}, and shorter than prefill, which reads {self.prefill}"
            )
        if not _are_integers(self.contexts) or not all(c > 0 for c in self.contexts):
            raise an.PassError(f"{self.name}: contexts={self.contexts!r}; they must be positive integers")

    def requires(self, program: Program) -> Refusal | None:
        """Refuse programs of several functions, and programs older than iOS 18."""
        if (several := against_several(program, "a cache needs one")) is not None:
            return several
        (function,) = program.functions.values()
        if function.opset_version < an.ct.target.iOS18:
            return Refusal(
                "states and slice_update came with iOS 18; convert with minimum_deployment_target=iOS18"
            )
        return None

    def run(self, program: Program, session: Session) -> None:
        """Replace the function by copies, each for its number of tokens.

        Raises:
            an.PassError: the context is too long; or nothing can be done, and `required` is set.
        """
        refusal = self.replace_function(program, session)
        if refusal is not None and self.required:
            raise an.PassError(f"{self.name}: {refusal}")
        session.refusals += [] if refusal is None else [(self.name, refusal)]

    def replace_function(self, program: Program, session: Session) -> Refusal | None:
        """Put the cached functions in place of the one; or return why not."""
        (function,) = program.functions.values()
        axis_choices = token_inputs.inputs_of(function, self.fixed or {})
        if isinstance(axis_choices, Refusal):
            return axis_choices
        tokens = function.inputs[next(iter(axis_choices[0]))]
        longest = int(tokens.shape[token_inputs.token_axis(tokens)])
        context = self.context or longest
        if context > longest:
            words = f"context={context} is longer than the {longest} positions of the model"
            raise an.PassError(f"{self.name}: {words}")
        if max(self.contexts, default=0) >= context:
            words = f"contexts={self.contexts!r}; they must be smaller than the context of {context}"
            raise an.PassError(f"{self.name}: {words}")
        chunk_of = chunk_numbers(program, self._chunk_limit(session))
        for token_axes in axis_choices:
            options = CacheOptions(
                tokens=token_axes,
                context=context,
                as_state=self.cache == "state",
                windows=self.windows,
                blended=self.writes == "blend",
                fixed=self.fixed or {},
                fixed_rope=self.fixed_rope,
                chunk_of=chunk_of,
            )
            built = cached_functions(session, program, self._call_sizes(context), options)
            if isinstance(built, Refusal):
                only_tokens = len(token_axes) == 1
                refusal = built if only_tokens else token_inputs.unclear(token_axes, f" ({built})")
                continue
            self._put_in_place(program, session, built, token_axes)
            if (parts := max(chunk_of.values(), default=0) + 1) > 1:
                session.notes.append(f"{self.name}: a state for each of {parts} chunks: split(model, {parts})")
            return None
        return refusal

    def _put_in_place(
        self, program: Program, session: Session, built: Mapping[str, an.Function], tokens: Mapping[str, int]
    ) -> None:
        """Replace the function by the new ones, and report what callers must change."""
        ((name, function),) = program.functions.items()
        old_ops = [f"{op.op_type} {op.name}" for op in function.operations if op.op_type != "const"]
        del program.functions[name]
        for new_name, new in built.items():
            program.add_function(new_name, new)
        session.declare(self.name, name, self._change(name, function, tokens, built), old_ops, list(built))
        version = max(f.opset_version.value for f in built.values())
        reports = loading.of_version(version, an.Target.parse(session.target))
        session.notes += [f"{self.name}: {report.message}" for report in reports]

    def _call_sizes(self, context: int) -> dict[str, CallSize]:
        """Return the name of each function and its sizes."""
        endings = {context: ""} | {smaller: f"_{smaller}" for smaller in sorted(set(self.contexts))}
        lengths = {"prefill": self.prefill, "decode": self.width}
        lengths |= {f"prefill{n}": n for n in sorted(set(self.shorter))}
        return {
            f"{name}{ending}": CallSize(min(length, size), size)
            for size, ending in endings.items()
            for name, length in lengths.items()
            if name in ("prefill", "decode") or length < min(self.prefill, size)
        }

    def _chunk_limit(self, session: Session) -> int | str:
        """Return the number of chunks, or the most bytes of weights in one as text: given, or of the target."""
        if self.chunks == "target":
            most_bytes, _ = an.Target.parse(session.target).least("program")
            return str(most_bytes)
        return self.chunks

    def _change(
        self, name: str, old: an.Function, inputs: Mapping[str, int], functions: Mapping[str, an.Function]
    ) -> an.InterfaceChange:
        """Return what callers must change; `inputs` are the inputs of tokens with their axes."""
        names = {name, *functions, *old.inputs, *(v.name for v in old.outputs)}
        names |= {n for f in functions.values() for n in (*f.inputs, *(v.name for v in f.outputs))}
        tokens, axis = next(iter(inputs.items()))
        length = functions["prefill"].inputs[tokens].shape[axis]
        fed_back = "the outputs cache_..._out, passed back in as cache_..., hold"
        kept = "the state holds" if self.cache == "state" else fed_back
        width = functions["decode"].inputs[tokens].shape[axis]
        words = (
            f"call prefill ({length} tokens) or decode ({width} token{'s' if width > 1 else ''}) with "
            f"{tokens}{token_inputs.rows_in_words(inputs)} and position, the number of "
            f"earlier tokens; {kept} what was read"
        )
        context = self.context

        def read(outputs: an.Values, inputs: an.Values) -> an.Values:
            return {n: v[:, :context] if np.ndim(v) > 1 else v for n, v in outputs.items()}

        return an.InterfaceChange(words, tuple(sorted(names)), outputs=read, call=replay)


@an.example((1, 16), dtype="int32", opset="iOS18")
def example(ids: Var) -> Var:
    """One attention over 16 tokens, with learned positions and a causal mask."""
    draw = np.random.default_rng(0).standard_normal
    words, places = (draw(shape).astype(np.float16) for shape in ((6, 4), (1, 16, 4)))
    causal = np.triu(np.full((16, 16), -1e4, np.float16), 1)
    place, mask = mb.const(val=places, name="place"), mb.const(val=causal, name="mask")
    x = mb.add(x=mb.gather(x=words, indices=ids, axis=0, name="e"), y=place, name="x")
    scores = mb.matmul(x=x, y=x, transpose_y=True, name="scores")
    weights = mb.softmax(x=mb.add(x=scores, y=mask, name="masked"), axis=-1, name="weights")
    return mb.linear(x=mb.matmul(x=weights, y=x, name="seen"), weight=words, name="logits")
