"""Describe a built model for its runner, from the model itself: the content of `runner.json`.

`build` calls `runner_of` at its end. A runner is this library's `chat`, or the Swift package that `swift`
writes. For each function of the model it reads the inputs, outputs and states, the context, and which chunks
have it.
"""

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
    """Return the content of `runner.json` for a folder.

    Args:
        folder: the built folder.
        model: the name of the package, or of the folder of chunks, in it.
        checkpoint: what the model was built from.
        most: the most tokens of a text. A recurrent state would take any number.
        hashes: file name -> hash, of the files of the folder.
    """
    decoder = Decoder(folder / model)
    call = decoder.calls[-1]
    manifest = folder / model / "chain.json"
    names = json.loads(manifest.read_text(encoding="utf-8"))["models"] if manifest.is_file() else []
    return Runner(
        model,
        tuple(f"{model}/{name}" for name in names) or (model,),
        described_functions(folder / model, decoder, most),
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


def described_functions(model: Path, decoder: Decoder, most: int) -> dict[str, Any]:
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
