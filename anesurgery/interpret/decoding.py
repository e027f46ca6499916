"""Let a decoder write text on the interpreter: read the prompt (prefill), then one token after another.

Two interfaces are supported. A *stateless* model reads a fixed number of tokens at once. A *cached* one, as
`add_cache` makes it, has functions that read a few tokens each at a `position`, and keeps the rest in states,
or in inputs `cache_0`, ... that come back as outputs `cache_0_out`, ... Embeddings, cosines and sines that are
inputs are looked up in tables (`decoder_calls`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from anesurgery.display import counted
from anesurgery.errors import InterpretError
from anesurgery.files.runner_file import model_of
from anesurgery.interpret.arithmetic.constant_memory import cache_limit_for_many_runs
from anesurgery.interpret.decoder_calls import Call, Tables, calls_of, tables_of
from anesurgery.interpret.predictor import Predictor
from anesurgery.interpret.sampler import Sampler, is_whole
from anesurgery.interpret.sampling import generator
from anesurgery.mil import Array, np_dtype, static_shape

Chooser = Callable[[Array, np.random.Generator], int]
"""(logits of all tokens, generator of random numbers) -> a token."""

AT_THE_END = 16
"""The number of tokens that `replay` gives one by one: a cache is then read at several places, at a run for
each."""

LOOKS_AHEAD = 1e-3
"""If other later tokens change logits by more than this share of the largest, the model is no causal decoder. A
long sum rounded to fp16 changes them by less."""


@dataclass(frozen=True)
class Writing:
    """What a decoder wrote."""

    prompt: tuple[int, ...]
    written: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt and what was written after it."""
        return self.prompt + self.written

    @property
    def tokens_per_second(self) -> float:
        """The speed after the prompt; NaN for a single token."""
        return (len(self.written) - 1) / self.decode_seconds if len(self.written) > 1 else float("nan")

    def __str__(self) -> str:
        then = f", then {self.tokens_per_second:.1f} tokens/s" if len(self.written) > 1 else ""
        wrote = f"{counted(len(self.written), 'token')} after a prompt of {len(self.prompt)}"
        return f"{wrote}: prompt {self.prefill_seconds:.2f} s{then}"


class Decoder:
    """A decoder with the tokens that it has read.

    Args:
        model: path of a package, MLModel or MIL program; or a folder with a `runner.json`.
        precision: the arithmetic of the interpreter.
        device: "cpu", or "cuda" where torch has one.
        output: the logits; the widest output by default.
        tables: for inputs of embeddings, or of a row for each position: the rows of all tokens or positions. By
            default `<package>.<input>.npy`, beside the package.
        drop: how many of the oldest tokens to forget at once, where more do not fit into the context. The rest
            is read again from position 0, as a text of its own. None: an error.

    Raises:
        InterpretError: its inputs are not those of a decoder, a table is missing, or `drop` cannot be it.
    """

    def __init__(
        self,
        model: Any,
        *,
        precision: str = "fp32",
        device: str = "cpu",
        output: str | None = None,
        tables: Tables | None = None,
        drop: int | None = None,
    ) -> None:
        model = model_of(model)
        whole = Predictor(model, precision=precision, device=device)
        self._calls = calls_of(whole, precision, device, output)
        self._tables = tables_of(model, self._calls[-1], tables or {})
        self._calls = [call.with_words(self.vocabulary) for call in self._calls]
        self._causal = self._calls[0].cached  # a stateless model has yet to show that it is
        for call in self._calls:
            if call.cached and call.length == self._calls[0].length:
                for executable in call.predictor.executables:
                    executable.plan.cache_limit = cache_limit_for_many_runs()  # one run for each token
        self.context = self._context()
        if drop is not None and not (is_whole(drop) and 0 < drop < self.context):
            raise InterpretError(
                f"drop={drop!r}; it must be a whole number from 1 to {self.context - 1}, as the context holds "
                f"{self.context} tokens"
            )
        self.drop = drop
        self.reset()

    def _context(self) -> int:
        """Return the most tokens that it can read."""
        rows = min((len(self._tables[r.name]) for r in self._calls[0].rows), default=sys.maxsize)
        if not self._calls[0].cached:
            return min(self._calls[0].length, rows)
        inputs = [e.function.inputs for call in self._calls for e in call.predictor.executables]
        if not any(name.startswith("cache_") for names in inputs for name in names):
            raise InterpretError(
                "it has an input 'position', but no state and no input that begins with 'cache_'"
            )
        return min(rows, max(call.context for call in self._calls))

    def reset(self) -> None:
        """Forget all tokens that were read."""
        first = self._calls[0]
        self._state = first.predictor.make_state() if first.cached else None
        self._held: dict[str, Array] = {}
        shape = [0 if a == first.axis else d for a, d in enumerate(first.shape)]
        self._read: Array = np.zeros(shape, first.dtype)

    @property
    def kept(self) -> Mapping[str, Array]:
        """The inputs of the next call that the last one gave back, such as caches; not the states."""
        return self._held

    @property
    def calls(self) -> Sequence[Call]:
        """Its functions, the one with the shortest call first."""
        return self._calls

    @property
    def vocabulary(self) -> int:
        """The number of tokens, as far as a table tells it."""
        call = self._calls[0]
        return call.vocabulary if call.embedded is None else len(self._tables[call.tokens])

    @property
    def position(self) -> int:
        """The number of tokens that it has read."""
        return int(self._read.shape[self._calls[0].axis])

    def feed(self, tokens: Sequence[int] | Array, *, whole: bool = True) -> Array:
        """Read tokens, and return the logits after each (`whole=False`: after the last), one row for each.

        If they do not fit into the context and `drop` is set, the oldest are forgotten first.

        Raises:
            InterpretError: they are no tokens, or do not fit into the context.
        """
        call = self._calls[0]
        ids = self._whole(tokens).astype(call.dtype)
        ids = ids.reshape([-1 if a == call.axis else d for a, d in enumerate(call.shape)])
        count = ids.shape[call.axis]
        if not count:
            raise InterpretError("no tokens; give one at least")
        if self.position + count > self.context and self.drop is None:
            raise InterpretError(
                f"{self.position + count} tokens do not fit into the context of {self.context}; "
                "give a shorter prompt, make the model with a longer one, or let it forget the oldest (drop=)"
            )
        if not whole:
            ids = self._forget(ids)
        rows: list[Array] = []
        for part in self._parts(ids):
            if whole:
                self._forget(part, self.position)
            rows += self._feed_part(part, whole)
        logits = rows if whole else rows[-1:]
        return np.stack(logits)

    def _parts(self, ids: Array) -> list[Array]:
        """Split tokens into parts that the longest function reads at once."""
        axis, most = self._calls[0].axis, self._calls[-1].length
        starts = range(0, ids.shape[axis], most)
        return [ids.take(range(at, min(at + most, ids.shape[axis])), axis=axis) for at in starts]

    def _forget(self, new: Array, most: int = sys.maxsize) -> Array:
        """Forget the oldest tokens, so that new ones fit, and read the others again from position 0.

        So every position and key is that of a text which begins with the tokens that remain.

        Args:
            new: the tokens to read next.
            most: the most tokens to forget.

        Returns:
            Those of the new tokens that remain, if even some of them must be forgotten.
        """
        axis = self._calls[0].axis
        over = self.position + new.shape[axis] - self.context
        if over <= 0 or self.drop is None:
            return new
        count = min(-(-over // self.drop) * self.drop, most)
        remaining = self._read.take(range(min(count, self.position), self.position), axis=axis)
        remaining_new = new.take(range(max(0, count - self.position), new.shape[axis]), axis=axis)
        self.reset()
        for part in self._parts(remaining):
            self._feed_part(part, False)
        return remaining_new

    def write(
        self,
        logits: Array,
        steps: int,
        choose: Sampler | Chooser,
        rng: np.random.Generator,
        stops: Collection[int] = (),
    ) -> Iterator[int]:
        """Choose tokens one after the other, and read each before the next is chosen.

        Args:
            logits: after what was read.
            steps: the most tokens.
            choose: gives a token.
            rng: its random numbers.
            stops: after one of these no other token is chosen.

        Raises:
            InterpretError: the model gives only the likeliest token, and the sampler may choose another.
        """
        call = self._calls[0]
        if call.greedy and isinstance(choose, Sampler) and not choose.greedy:
            raise InterpretError(
                f"the model gives {call.output}, the likeliest, and no logits to sample from; leave out the "
                "options of sampling, or make it with its logits"
            )
        for step in range(steps):
            read = (self._read.ravel(),) if isinstance(choose, Sampler) else ()
            token = int(self._whole(choose(logits, rng, *read)))
            yield token
            if token in stops or step == steps - 1:
                return
            logits = self.feed([token])[-1]

    def _whole(self, tokens: Any) -> Array:
        """Return tokens as an array; raise `InterpretError` if some are no whole numbers of the vocabulary."""
        try:
            ids = np.asarray(tokens)
        except ValueError:
            ids = np.asarray(None)
        whole = ids.dtype.kind in "iu" or (ids.dtype.kind == "f" and bool((ids == np.floor(ids)).all()))
        if ids.size != max(ids.shape, default=1):
            raise InterpretError(f"tokens are one row, and not an array of shape {ids.shape}")
        if ids.size and not whole:
            raise InterpretError(f"tokens are whole numbers, and not {tokens!r:.60}")
        words = self.vocabulary
        wrong = ids[(ids < 0) | (ids >= words)] if ids.size else ids
        if wrong.size:
            most = f"to {words - 1}" if words < sys.maxsize else "on"
            raise InterpretError(f"{wrong.flat[0]} is no token of the model; tokens are from 0 {most}")
        return ids

    def _feed_part(self, part: Array, whole: bool) -> list[Array]:
        """Read tokens that fit into one call; return the logits of each (`whole`), or at least of the last."""
        axis, before = self._calls[0].axis, self.position
        count = part.shape[axis]
        call = next(c for c in self._calls if c.length >= count and c.context >= before + count)
        one_by_one = call.one_row and (whole or not call.reads(before + count))
        if count > 1 and one_by_one and self._calls[0].reads(before + 1):
            return [self._feed_part(part.take([at], axis), whole)[0] for at in range(count)]
        if not call.reads(before + count):
            raise InterpretError(
                f"the model gives the logits of its last token only, and reads {call.length} at once; "
                f'{before + count} tokens do not fill it: use `select_last_token` with position="input", or '
                "`add_cache` before it"
            )
        self._read = np.concatenate([self._read, part], axis=axis)
        start = max(0, before + count - call.length) if call.cached else 0
        logits = self._run(call, start)
        is_padded = self.position < call.length
        if not self._causal and is_padded and (call.picker or len(logits) == call.length):
            self._check_causal(call, logits[: self.position])
        return list(logits if call.one_row else logits[before - start : before - start + count])

    def _check_causal(self, call: Call, logits: Array) -> None:
        """Raise `InterpretError` if later tokens change logits: run again with others in their place."""
        other = self._run(call, 0, fill=self.vocabulary - 1 if self.vocabulary < sys.maxsize else 1)
        finite = np.isfinite(logits)
        largest = float(np.abs(logits[finite]).max(initial=0))
        change = float(np.abs(other[: len(logits)] - logits, where=finite, out=np.zeros_like(logits)).max())
        if change > LOOKS_AHEAD * largest:
            raise InterpretError(
                f"the model is no causal decoder: with other tokens after these their logits change by "
                f"{change:.3g}, and the largest is {largest:.3g}"
            )
        self._causal = True

    def _run(self, call: Call, start: int, fill: int = 0) -> Array:
        """Call a function on the tokens from `start` on, then `fill`; return its logits, [rows, vocabulary]."""
        stop = min(start + call.length, self.position)
        read = self._read.take(range(start, stop), axis=call.axis)
        pads = [(0, call.length - n if a == call.axis else 0) for a, n in enumerate(read.shape)]
        tokens = np.pad(read, pads, constant_values=fill)
        values: dict[str, Any] = {call.tokens: tokens, **self._held}
        if call.embedded is not None:
            values[call.tokens] = call.embedded.look_up(self._tables[call.tokens], tokens.ravel())
        for rows in call.rows:
            table = self._tables[rows.name]
            values[rows.name] = rows.look_up(table, np.arange(start, min(start + call.length, len(table))))
        if call.picker:
            values[call.picker] = self._one_hot(call, stop - 1 - start)
        for name in call.back if call.cached else ():
            values.setdefault(name, self._zeros(call, name))
        outputs = call.predictor(call.inputs(values, start), state=self._state)
        self._held = {name: outputs[back] for name, back in call.back.items()}
        return call.logits(outputs)

    def _one_hot(self, call: Call, place: int) -> Array:
        """Return the input that picks one token: 1 at its place, else 0."""
        mask = self._zeros(call, call.picker)
        mask[..., place] = 1
        return mask

    @staticmethod
    def _zeros(call: Call, name: str) -> Array:
        """Return an input that is zero everywhere, as a cache is before the first call."""
        var = call.predictor.ports[0][name]
        return np.zeros(static_shape(var) or (), np_dtype(var))


def _stop_tokens(stop: Any, decoder: Decoder) -> frozenset[int]:
    """Return the tokens after which to stop; raise `InterpretError` if one is no token of the model."""
    listed = () if stop is None else (stop,) if is_whole(stop) else stop
    if isinstance(listed, (str, bytes)) or not isinstance(listed, (Collection, np.ndarray)):
        raise InterpretError(f"stop={stop!r:.60}; it must be a token, or several as [2, 7]; `chat` takes texts")
    tokens = list(listed)
    if wrong := [t for t in tokens if not is_whole(t)]:
        cure = "tokens are whole numbers; `chat` takes texts too"
        raise InterpretError(f"stop={stop!r:.60}: {wrong[0]!r:.40} is no token; {cure}")
    return frozenset(decoder._whole(tokens).tolist())


def _check_sampling(steps: Any, sampler: Any, seed: Any) -> tuple[Chooser, np.random.Generator]:
    """Check the options of sampling, and return what chooses the tokens, and its random numbers."""
    if not is_whole(steps) or steps < 1:
        raise InterpretError(f"steps={steps!r}; it must be a positive integer")
    choose = Sampler() if sampler is None else sampler
    if not callable(choose):
        raise InterpretError(f"sampler={sampler!r}; it must be a Sampler, or take logits and a generator")
    return choose, generator(seed)


def _check_fits(decoder: Decoder, tokens: int, steps: int) -> None:
    """Raise `InterpretError` if a prompt and the tokens to write do not fit into the context."""
    if decoder.drop is None and decoder.position + tokens + steps - 1 > decoder.context:
        raise InterpretError(
            f"{counted(tokens, 'token')} and {counted(steps, 'step')} do not fit into the context of "
            f"{decoder.context}, the length of the input {decoder.calls[0].tokens}"
            + (f"; {decoder.position} are taken" if decoder.position else "")
        )


def generate(
    model: Any,
    prompt_ids: Sequence[int],
    steps: int,
    sampler: Sampler | Chooser | None = None,
    *,
    stop: int | Collection[int] | None = None,
    seed: int = 0,
    precision: str | None = None,
    device: str | None = None,
    tables: Tables | None = None,
    drop: int | None = None,
    quiet: bool = False,
) -> Writing:
    """Let a decoder write after a prompt, on the interpreter.

    Args:
        model: path of a package, MLModel or MIL program, stateless or with a cache (`add_cache`); or a
            `Decoder`, which goes on after what it has read.
        prompt_ids: the tokens to begin with.
        steps: how many tokens to write.
        sampler: chooses a token from logits; by default the likeliest.
        stop: the token after which to stop, or several.
        seed: of the sampler: a whole number from 0 up.
        precision: the arithmetic: "fp32" (the default), "fp16" or "ane". A `Decoder` has its own.
        device: "cpu" (the default), or "cuda" where torch has one. A `Decoder` has its own.
        tables: for inputs of embeddings, or of one row for each position. Default: the tables beside the
            package. A `Decoder` has its own.
        drop: how many of the oldest tokens to forget when the context is full; the rest is read again. None: an
            error. A `Decoder` has its own.
        quiet: no progress bar (it vanishes by itself when the output is no terminal).

    Returns:
        The `Writing`: the tokens of the prompt and those `written`, with the seconds that both took.

    Raises:
        InterpretError: the model is no decoder, the text does not fit into its context, or an option has a
            wrong value.
        LoadError: the model cannot be read.
    """
    choose, rng = _check_sampling(steps, sampler, seed)
    decoder = _decoder(model, precision=precision, device=device, tables=tables, drop=drop)
    stops = _stop_tokens(stop, decoder)
    prompt = tuple(decoder._whole(prompt_ids).ravel().tolist())
    _check_fits(decoder, len(prompt), steps)
    started = time.perf_counter()
    logits = decoder.feed(prompt, whole=False)[-1]
    read = time.perf_counter()
    tokens = decoder.write(logits, steps, choose, rng, stops)
    written = tuple(tqdm(tokens, total=steps, unit=" tokens", disable=True if quiet else None, leave=False))
    return Writing(prompt, written, read - started, time.perf_counter() - read)


def stream(
    model: Any,
    prompt_ids: Sequence[int],
    steps: int | None = None,
    sampler: Sampler | Chooser | None = None,
    *,
    stop: int | Collection[int] | None = None,
    seed: int = 0,
    drop: int | None = None,
) -> Iterator[int]:
    """Yield the tokens that a decoder writes after a prompt, one by one.

    Args:
        model: path of a package, MLModel or MIL program; or a `Decoder`, which goes on after what it has read.
        prompt_ids: the tokens to begin with.
        steps: how many tokens to write at most; None: to the end of the context, or, with `drop`, without end.
        sampler: chooses a token from logits; by default the likeliest.
        stop: the token after which to stop, or several. It is given as well.
        seed: of the sampler: a whole number from 0 up.
        drop: how many of the oldest tokens to forget at once, as for `generate`.

    Returns:
        An iterator over the tokens, whole numbers.

    Raises:
        InterpretError: as `generate` does.
        LoadError: the model cannot be read.
    """
    decoder = _decoder(model, drop=drop)
    prompt = decoder._whole(prompt_ids).ravel().tolist()
    if steps is None and decoder.drop is not None:
        steps = sys.maxsize
    elif steps is None:
        steps = max(1, decoder.context - decoder.position - len(prompt) + 1)
    choose, rng = _check_sampling(steps, sampler, seed)
    stops = _stop_tokens(stop, decoder)
    _check_fits(decoder, len(prompt), steps)
    return decoder.write(decoder.feed(prompt, whole=False)[-1], steps, choose, rng, stops)


def _decoder(model: Any, **options: Any) -> Decoder:
    """Return the decoder that writes: the model given, if it is one, which then takes no options."""
    chosen = {name: value for name, value in options.items() if value is not None}
    if not isinstance(model, Decoder):
        return Decoder(model, **chosen)
    if chosen:
        raise InterpretError(f"{', '.join(chosen)}: a Decoder has its own; give it where the Decoder is made")
    return model


def replay(model: Any, values: Mapping[str, Array], precision: str) -> dict[str, Array]:
    """Run a cached model on the inputs of its stateless form, and return that form's outputs, to compare them.

    The tokens are read by calls of `prefill`, and the last `AT_THE_END` of them by `decode`. If the model gives
    the logits of its last token only, so does the result.

    Args:
        model: a decoder with a cache.
        values: inputs of the stateless form: all tokens, or all rows of embeddings.
        precision: the arithmetic.
    """
    predictor = Predictor(model, precision=precision)
    looked_up = {rows.name for rows in calls_of(predictor, precision, "cpu", None)[-1].looked_up}
    tables = {name: v for name, v in values.items() if name in looked_up}
    decoder = Decoder(predictor, precision=precision, tables=tables)
    call = decoder._calls[0]
    tokens = np.asarray(values[call.tokens])
    if call.embedded is not None:
        tokens = np.arange(decoder.vocabulary)[None]
    count = min(decoder.context, tokens.shape[call.axis])
    prefill = max(1, count - AT_THE_END)
    one_row = decoder._calls[-1].one_row
    rows = [decoder.feed(tokens.take(range(prefill), axis=call.axis), whole=not one_row)]
    rows += [decoder.feed(tokens.take([at], axis=call.axis)) for at in range(prefill, count)]
    return call.outputs(rows[-1] if one_row else np.concatenate(rows))
