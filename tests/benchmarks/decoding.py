"""One token after another: a Llama with the cache of `add_cache` on the interpreter, against torch eager.

The model has the shape of TinyLlama, 1.1 billion weights, which are random. Torch keeps a cache of its own
(`DynamicCache`, fp32). Both read the same prompt, then one token each by turns; the ratio is the median over
the later half of the tokens, in one run. The model is converted in a process of its own, whose memory is then
free again, and `add_cache` is timed in another.

`--small` has 50 million weights and takes about a minute: packages in fp32 and fp16, a prompt of 128 tokens and
the tokens after it, each the median over five rounds in which ours and torch's take turns.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interpreter import clock, judged
from peak import Watch

MOST, SECONDS, BYTES = 1.2, 30, 2e9
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "vocab_size": 32000}
SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 24000}
SMALL_LAYERS, PROMPT, AFTER, ROUNDS = 8, 128, 12, 5
GOALS = {"fp32": 1.2, "fp16": 1.3}
"""Times torch, for a token, by the type of the package; a prompt may take MOST in both."""


def llama(layers: int, sizes: dict[str, int] | None = None) -> Any:
    """The module."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        **(sizes or LARGE),
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def package(module: Any, context: int, half: bool, path: Path) -> None:
    """The module converted, without a cache."""
    from anesurgery import frontend
    from anesurgery.mil import ct, quiet_host

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, ids: torch.Tensor) -> Any:
            return self.model(input_ids=ids, use_cache=False).logits

    frontend.register()
    ids = torch.zeros((1, context), dtype=torch.long)
    with torch.no_grad(), quiet_host():
        traced = torch.jit.trace(Logits().eval(), ids, check_trace=False)  # type: ignore[no-untyped-call]
        ct.convert(
            traced,
            inputs=[ct.TensorType("input_ids", shape=ids.shape, dtype=np.int32)],
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
            skip_model_load=True,
        ).save(str(path))


def add_cache(before: str, after: str) -> None:
    """Print seconds of the pass, and bytes of memory that it took beyond loading the model."""
    import anesurgery as ane
    from anesurgery.loading import load

    load(before)
    watch, start = Watch(), time.perf_counter()
    watch.start()
    made = ane.apply(before, "add_cache", quiet=True)
    seconds, report = time.perf_counter() - start, watch.report()
    made.save(after)
    print(json.dumps({"seconds": seconds, "bytes": report["resident"] - report["base"]}))


def by_turns(module: Any, path: Path, context: int) -> tuple[list[float], list[float], float]:
    """Seconds for each token of both, and the largest difference of logits, of the largest logit."""
    from transformers import DynamicCache

    from anesurgery.interpret.decoding import Decoder

    decoder, cache, read = Decoder(path), DynamicCache(config=module.config), clock()
    ids = np.random.default_rng(0).integers(3, 32000, context)
    ours: list[float] = []
    theirs: list[float] = []
    prompt = context // 2
    decoder.feed(ids[:prompt], whole=False)
    with torch.inference_mode():
        module(torch.from_numpy(ids[None, :prompt]), past_key_values=cache, use_cache=True)
        worst = 0.0
        for at in range(prompt, min(context, prompt + 24)):
            start = read()
            found = decoder.feed(ids[at : at + 1])[-1]
            between = read()
            made = module(torch.from_numpy(ids[None, at : at + 1]), past_key_values=cache, use_cache=True)
            theirs.append(read() - between)
            ours.append(between - start)
            logits = made.logits[0, -1].numpy()
            worst = max(worst, float(np.abs(found - logits).max() / np.abs(logits).max()))
    return ours, theirs, worst


def taking_turns(module: Any, path: Path) -> list[tuple[float, float]]:
    """Ours by torch's, in each round: of the prompt, and of a token after it."""
    from transformers import DynamicCache

    from anesurgery.interpret.decoding import Decoder

    decoder, read = Decoder(path), clock()
    ids = np.random.default_rng(0).integers(3, module.config.vocab_size, PROMPT + AFTER)
    ratios: list[tuple[float, float]] = []
    for _ in range(ROUNDS + 1):  # the first does not count
        decoder.reset()
        cache = DynamicCache(config=module.config)
        seconds: list[tuple[float, float]] = []
        for first, last in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + AFTER))]:
            start = read()
            decoder.feed(ids[first:last], whole=False)
            between = read()
            with torch.inference_mode():
                given = torch.from_numpy(ids[None, first:last])
                module(given, past_key_values=cache, use_cache=True)  # logits of all, as ours gives
            seconds.append((between - start, read() - between))
        prompt, *tokens = (ours / theirs for ours, theirs in seconds)
        ratios.append((prompt, statistics.median(tokens)))
    return ratios[1:]


def small() -> None:
    """Measure a small model, and print."""
    import anesurgery as ane

    module = llama(SMALL_LAYERS, SMALL)
    print(f"{sum(p.numel() for p in module.parameters()) / 1e6:.0f} million weights, by torch's time")
    for word, most in GOALS.items():
        with tempfile.TemporaryDirectory() as name:
            before, after = (Path(name) / f"{word}.mlpackage" for word in ("before", "after"))
            package(module, 2 * PROMPT, word == "fp16", before)
            ane.apply(before, ane.passes.AddCache(prefill=PROMPT), prove=None, quiet=True).save(after)
            prompts, tokens = zip(*taking_turns(module, after), strict=True)
        for words, found, goal in ((f"prompt of {PROMPT}", prompts, MOST), ("a token", tokens, most)):
            print(
                f"{word} package, {words}: {judged(statistics.median(found), goal)} "
                f"({min(found):.2f} to {max(found):.2f})"
            )


def again(*arguments: str) -> str:
    """What this script prints in a process of its own."""
    made = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(made.stderr[-2000:])
    return made.stdout


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="50 million weights, in a minute")
    parser.add_argument("--half", action="store_true", help="a package of fp16")
    parser.add_argument("--add-cache", nargs=2, metavar=("BEFORE", "AFTER"), help=argparse.SUPPRESS)
    parser.add_argument("--convert", type=Path, metavar="PACKAGE", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.add_cache:
        add_cache(*chosen.add_cache)
        return
    if chosen.convert:
        package(llama(chosen.layers), chosen.context, chosen.half, chosen.convert)
        return
    torch.set_num_threads(chosen.threads)
    if chosen.small:
        small()
        return
    with tempfile.TemporaryDirectory() as name:
        before, after = (Path(name) / f"{word}.mlpackage" for word in ("before", "after"))
        again(*sys.argv[1:], "--convert", str(before))
        spent = json.loads(again("--add-cache", str(before), str(after)).splitlines()[-1])
        shutil.rmtree(before)
        module = llama(chosen.layers)
        weights = sum(p.numel() for p in module.parameters())
        ours, theirs, worst = by_turns(module, after, chosen.context)
    late = len(ours) // 2
    ratios = [a / b for a, b in zip(ours[late:], theirs[late:], strict=True)]
    print(
        f"{weights / 1e9:.2f} billion weights, {'fp16' if chosen.half else 'fp32'} package, "
        f"context {chosen.context}\n"
        f"add_cache: {judged(spent['seconds'], SECONDS)} s, {judged(spent['bytes'] / 1e9, BYTES / 1e9)} GB\n"
        f"decode: {judged(statistics.median(ratios), MOST)} x torch ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"{statistics.median(ours[late:]) * 1e3:.0f} ms a token; largest relative error {worst:.1e}"
    )


if __name__ == "__main__":
    main()
