"""What a runner must know of a built model, read from the model itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anesurgery.files.runner_file import Runner
from anesurgery.interpret.decoder_calls import INPUTS
from anesurgery.interpret.decoding import Decoder
from anesurgery.interpret.predictor import Predictor
from anesurgery.mil import Var, dtype_name, static_shape, types
from anesurgery.shipping.checkpoint import Checkpoint


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
