"""The MIL text: what is read, what is refused and in which words, and that the writer gives it back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import assert_linear

from anesurgery.errors import LoadError
from anesurgery.files.mil_text import MilText, elements_of, opset_of, opset_text, read_mil, write_mil
from anesurgery.files.mil_types import quote, unescape
from anesurgery.mil import Array


def program(*lines: str, inputs: str = "tensor<fp32, [2]> x", outputs: str = "x", attributes: str = "") -> str:
    body = "\n".join(f"            {line}" for line in lines)
    return (
        f"program(1.3)\n{attributes}{{\n    func main<ios18>({inputs}) {{\n{body}\n"
        f"        }} -> ({outputs});\n}}"
    )


def block(text: str) -> Any:
    function = read_mil(text).program.functions["main"]
    return function.block_specializations[function.opset]


def value(text: str) -> Any:
    """A value, read as the attribute of an op."""
    made = block(program(f"tensor<fp32, [2]> y = relu(x = x)[a = {text}];")).operations[0].attributes["a"]
    again = write_mil(read_mil(program(f"tensor<fp32, [2]> y = relu(x = x)[a = {text}];")).program)
    assert block(again).operations[0].attributes["a"] == made
    return made


def numbers(text: str) -> Array:
    made = value(text)
    kind = re.match(r"tensor<(\w+)|(\w+)", text)
    assert kind is not None
    return np.asarray(elements_of(made.immediateValue.tensor, kind[1] or kind[2], None))


COMPILED = ["fluid_argmax", "silero_unified", "silero_unified_palette_4bit"]


@pytest.mark.parametrize("name", COMPILED)
def test_the_text_of_the_compiler_is_written_back_byte_for_byte(name: str, corpus: Path) -> None:
    text = (corpus / f"{name}.mlmodelc" / "model.mil").read_text(encoding="utf-8")
    made = read_mil(text)
    assert made.version == "1.0"
    assert write_mil(made.program, made.version) == text


@pytest.mark.parametrize(
    ("text", "dtype", "expected"),
    [
        ("fp32(0x1.8p+1)", np.float32, [3]),
        ("fp32(1.5)", np.float32, [1.5]),
        ("fp32(-0x0p+0)", np.float32, [-0.0]),
        ("tensor<fp32, [3]>([inf, -inf, nan])", np.float32, [np.inf, -np.inf, np.nan]),
        ("fp32(0x1p-149)", np.float32, [2.0**-149]),
        ("fp16(0x1p-24)", np.float16, [2.0**-24]),
        ("tensor<fp16, [2]>([0x1.ffcp+15, -0x1.5p-17])", np.float16, [65504, -1.3125 * 2**-17]),
        ("fp64(0x1.999999999999ap-4)", np.float64, [0.1]),
        ("int8(-128)", np.int8, [-128]),
        ("uint8(255)", np.uint8, [255]),
        ("int16(-32768)", np.int16, [-32768]),
        ("uint16(65535)", np.uint16, [65535]),
        ("int32(-2147483648)", np.int32, [-(2**31)]),
        ("tensor<uint32, [2]>([0, 4294967295])", np.uint32, [0, 2**32 - 1]),
        ("int64(-9223372036854775808)", np.int64, [-(2**63)]),
        ("uint64(18446744073709551615)", np.uint64, [2**64 - 1]),
        ("tensor<bool, [2]>([true, false])", np.bool_, [True, False]),
        ("tensor<int32, [2, 2]>([[1, 2], [3, 4]])", np.int64, [1, 2, 3, 4]),
        ("tensor<int32, [2, 2]>([1, 2, 3, 4])", np.int64, [1, 2, 3, 4]),
        ("tensor<int32, [0]>([])", np.int64, []),
        ("tensor<int32, []>(7)", np.int64, [7]),
    ],
)
def test_numbers_are_read_exactly(text: str, dtype: Any, expected: list[float]) -> None:
    assert numbers(text).astype(dtype).tobytes() == np.asarray(expected, dtype).tobytes()


@pytest.mark.parametrize(
    ("bits", "signed"), [(1, False), (2, False), (3, False), (4, False), (6, False), (4, True)]
)
def test_numbers_of_fewer_than_eight_bits_are_packed_as_coremltools_does(bits: int, signed: bool) -> None:
    from coremltools.optimize import _utils as host

    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if signed else (0, 1 << bits)
    given = np.arange(37) % (high - low) + low
    theirs = host.pack_elements_into_bits(given.astype(np.int8 if signed else np.uint8), bits)
    text = f"tensor<{'' if signed else 'u'}int{bits}, [37]>([{', '.join(map(str, given))}])"
    assert value(text).immediateValue.tensor.bytes.values == theirs.tobytes()
    assert numbers(text)[:37].tolist() == given.tolist()


def test_both_forms_of_a_scalar_are_the_same() -> None:
    assert value('tensor<string, []>("a")') == value('string("a")')
    assert value("tensor<int32, []>(1)") == value("int32(1)")


def test_strings_keep_every_character() -> None:
    text = 'quote " backslash \\ newline \n tab \t zero \0 bell \a and é 漢 🙂'
    assert unescape(quote(text)[1:-1]) == text
    assert value(f"string({quote(text)})").immediateValue.tensor.strings.values[0] == text
    assert unescape(r"\101\x41\u0041\U00000041\q") == "AAAAq"
    found = value('tensor<string, [2]>(["a, b", "]"])').immediateValue.tensor.strings.values
    assert list(found) == ["a, b", "]"]


def test_compound_values() -> None:
    made = value('dict<string, tuple<int32, list<fp16, 2>>>({{"a", (1, [0x1p+0, nan])}, {"b", (2, [0, 1])}})')
    pairs = made.immediateValue.dictionary.values
    assert [p.key.immediateValue.tensor.strings.values[0] for p in pairs] == ["a", "b"]
    first, second = pairs[1].value.immediateValue.tuple.values
    assert first.immediateValue.tensor.ints.values[0] == 2
    assert len(second.immediateValue.list.values) == 2
    assert not value("dict<string, string>({})").immediateValue.dictionary.values
    assert value("list<tensor<int32, [2]>, ?>([[1, 2], [3, 4]])").immediateValue.list.values[1].type


@pytest.mark.parametrize("form", ["string(\"{}\"), offset = uint64({})", "tensor<string, []>(\"{}\"), offset = "
                                  "tensor<uint64, []>({})"])  # fmt: skip
def test_weights_become_places_in_a_file(form: str) -> None:
    place = "@model_path/weights/weight.bin", 18446744073709551
    made = value(f"tensor<fp16, [8, 4]>(BLOBFILE(path = {form.format(*place)}))")
    assert (made.blobFileValue.fileName, made.blobFileValue.offset) == place


def test_types_of_any_shape() -> None:
    inputs = (
        "tensor<fp16, [1, ?, 3]> a, tensor<fp32, [batch, 4]> b, tensor<int32, [...]> c, int32 d, "
        "state<tensor<fp16, [2, 4]>> e, list<tensor<fp32, [?]>, 4> f, list<string, ?> g, tensor<bool, ?> h"
    )
    text = program(inputs=inputs, outputs="a")
    made = {v.name: v.type for v in read_mil(text).program.functions["main"].inputs}
    dims = [d.WhichOneof("dimension") for d in made["a"].tensorType.dimensions]
    assert dims == ["constant", "unknown", "constant"]
    assert made["b"].tensorType.rank == 2
    assert made["b"].tensorType.dimensions[0].WhichOneof("dimension") == "unknown"
    assert made["c"].tensorType.rank == -1
    assert made["c"].tensorType.dimensions[0].unknown.variadic
    assert made["d"].tensorType.rank == 0
    assert made["e"].stateType.wrappedType.tensorType.rank == 2
    assert made["f"].listType.length.constant.size == 4
    assert made["g"].listType.length.WhichOneof("dimension") == "unknown"
    assert made["h"].tensorType.rank == -1
    assert write_mil(read_mil(text).program) == text.replace("batch", "?").replace("{\n\n", "{\n")


def test_arguments_are_names_values_or_several() -> None:
    op = block(
        program("fp32 y = concat(axis = int32(0), empty = (), interleave = x, values = (x, x, fp32(1)));")
    ).operations[0]
    kinds = {n: [b.WhichOneof("binding") for b in a.arguments] for n, a in op.inputs.items()}
    assert kinds == {
        "axis": ["value"],
        "empty": [],
        "interleave": ["name"],
        "values": ["name", "name", "value"],
    }


def test_one_value_of_a_tuple_stays_in_parentheses() -> None:
    text = program("tensor<fp32, [2]> y = concat(axis = int32(0), values = (x));", outputs="y")
    assert write_mil(read_mil(text).program) == text


def test_states_functions_and_names_with_other_characters() -> None:
    text = (
        'program(1.3)\n[buildInfo = dict<string, string>({{"a", "b"}})]\n{\n'
        "    func decode<ios18>(state<tensor<fp16, [2]>> cache, tensor<fp16, [2]> x) {\n"
        "            write_state(data = x, input = cache);\n"
        '            tensor<fp16, [2]> "odd name-1" = read_state(input = cache)[name = string("r")];\n'
        '        } -> ("odd name-1");\n'
        "    func prefill<ios26>(tensor<fp16, [2]> x.1, tensor<fp16, [2]> y@0) {\n"
        "        } -> (x.1, y@0);\n"
        "}"
    )
    made = read_mil(text).program
    assert sorted(made.functions) == ["decode", "prefill"]
    ops = made.functions["decode"].block_specializations["CoreML8"].operations
    assert [op.type for op in ops] == ["write_state", "read_state"]
    assert not ops[0].outputs
    assert made.functions["prefill"].opset == "CoreML9"
    assert write_mil(made) == text


def test_opsets() -> None:
    pairs = {f"ios1{i}": f"CoreML{i}" for i in range(3, 9)} | {"ios26": "CoreML9", "ios27": "ios27"}
    assert {k: opset_of(k) for k in pairs} == pairs
    assert {opset_text(v): v for v in pairs.values()} == pairs


LOOP = """tensor<fp32, [2]> y, int32 n = while_loop(loop_vars = (x, k))[name = string("loop")]
                {first}(tensor<fp32, [2]> a, int32 i) {{
                    bool c = less(x = i, y = k);
                }} -> (c){comma}
                {second}(tensor<fp32, [2]> b, int32 j) {{
                    tensor<fp32, [2]> d = add(x = b, y = x);
                }} -> (d, j);"""


@pytest.mark.parametrize(
    ("first", "second", "comma"), [("block0", "block1", ","), ("", "", ""), ("c", "", ",")]
)
def test_nested_blocks_with_and_without_names_and_commas(first: str, second: str, comma: str) -> None:
    loop = LOOP.format(first=first, second=second, comma=comma)
    text = program("int32 k = const()[val = int32(3)];", loop, outputs="y")
    op = block(text).operations[1]
    assert [[v.name for v in b.inputs] for b in op.blocks] == [["a", "i"], ["b", "j"]]
    assert [list(b.outputs) for b in op.blocks] == [["c"], ["d", "j"]]
    again = write_mil(read_mil(text).program)
    assert read_mil(again).program == read_mil(text).program
    if first == "block0":
        assert again == text


def test_blocks_without_inputs_and_before_the_attributes() -> None:
    text = program(
        "bool p = const()[val = bool(true)];",
        "fp32 y = cond(pred = p) { fp32 a = const()[val = fp32(1)]; } -> (a), "
        '{ fp32 a = const()[val = fp32(2)]; } -> (a) [name = string("y")];',
        outputs="y",
    )
    op = block(text).operations[1]
    assert len(op.blocks) == 2
    assert sorted(op.attributes) == ["name"]


def test_a_name_of_a_nested_block_is_not_seen_outside() -> None:
    loop = LOOP.format(first="", second="", comma=",")
    with pytest.raises(LoadError, match="'d' is not defined here"):
        read_mil(program("int32 k = const()[val = int32(3)];", loop, outputs="d"))


ERRORS = {
    "program": ("", "line 1, column 1: it ends before 'program'"),
    "version": ("program(x)", "expected the version of the text, as in .*, found 'x'"),
    "no function": ("program(1.0) {}", "the program has no function"),
    "after the end": (program() + " x", "expected the end of the program, found 'x'"),
    "cut short": (program()[:35], "it ends before"),
    "missing comma": (program(inputs="tensor<fp32, [2]> x tensor<fp32, [2]> z"), "found 'tensor'"),
    "element type": (program(inputs="tensor<fp33, [2]> x"), "there is no element type 'fp33'"),
    "no type": (program(inputs="banana x"), "expected a type, found 'banana'"),
    "dimension": (program(inputs="tensor<fp32, [2 2]> x"), "'2 2' is not a size of a dimension"),
    "huge dimension": (program(inputs=f"tensor<fp32, [{'9' * 30}]> x"), "is not a size of a dimension"),
    "undefined": (program("int32 y = relu(x = xx);"), r"'xx' is not defined here; did you mean 'x'\?"),
    "output": (program(outputs="y"), "'y' is not defined here"),
    "twice": (program("int32 x = relu(x = x);"), "'x' is defined twice"),
    "function twice": (program()[:-1] + program()[15:], "function 'main' is defined twice"),
    "input twice": (program("int32 y = relu(x = x, x = x);"), "input 'x' is given twice"),
    "attribute twice": (program("int32 y = relu(x = x)[a = int32(1), a = int32(1)];"), "'a' is given twice"),
    "semicolon": (program("int32 y = relu(x = x)"), "expected ';'"),
    "too few": (program("int32 y = const()[val = tensor<int32, [3]>([1, 2])];"), "3 element.*value has 2"),
    "too many": (program("int32 y = const()[val = tensor<string, [1]>([\"a\", \"b\"])];"), "the value has 2"),
    "no number": (program("int32 y = const()[val = tensor<int32, [3]>([1, two, 3])];"), "'two' .element 1. is"),
    "overflow": (program("int32 y = const()[val = int8(128)];"), r"'128' \(element 0\) is no int8"),
    "fp16 overflow": (program("int32 y = const()[val = fp16(0x1p+16)];"), "is no fp16"),
    "underscore": (program("int32 y = const()[val = int32(1_0)];"), "'1_0'"),
    "bool": (program("int32 y = const()[val = bool(yes)];"), "'yes' .* is no bool"),
    "bracket": (program("int32 y = const()[val = tensor<int32, [1]>([1)];"), "this bracket is not closed"),
    "string": (program('int32 y = const()[val = string(1)];'), "expected '\\['"),
    "blob": (program("int32 y = const()[val = int32(BLOBFILE(1))];"), "BLOBFILE needs a path and an offset"),
    "tuple": (program("int32 y = const()[val = tuple<int32>((1, 2))];"), "has 1 types, and more values"),
    "short tuple": (program("int32 y = const()[val = tuple<int32, int32>((1))];"), "has 2 types, and 1 values"),
    "state value": (program("int32 y = const()[val = state<int32>(1)];"), "a state has no value"),
    "too deep": (program(inputs="list<" * 5000 + "x"), "nests types or blocks too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_is_wrong(case: str) -> None:
    text, words = ERRORS[case]
    with pytest.raises(LoadError, match=words):
        read_mil(text)


def test_errors_show_the_line() -> None:
    text = program("int32 y = relu(x = x);", "int32 z = relu(x = yy);")
    with pytest.raises(LoadError) as caught:
        read_mil(text, "m.mlmodelc/model.mil")
    words, line, mark = str(caught.value).splitlines()
    assert words == "m.mlmodelc/model.mil, line 5, column 32: 'yy' is not defined here; did you mean 'y'?"
    assert line.strip() == "int32 z = relu(x = yy);"
    assert line[mark.index("^")] in " y"


def test_a_line_cannot_reach_the_terminal() -> None:
    with pytest.raises(LoadError) as caught:
        read_mil(program("\x1b[31m int32 y = relu(x = x);"))
    assert "\x1b" not in str(caught.value)


def test_a_long_line_is_shown_in_part() -> None:
    long = ", ".join(["1"] * 5000)
    with pytest.raises(LoadError) as caught:
        read_mil(program(f"int32 y = const()[val = tensor<int32, [5000]>([{long}]) banana];"))
    assert "found 'banana'" in str(caught.value)
    assert all(len(line) < 200 for line in str(caught.value).splitlines())


def many_ops(count: int) -> str:
    """A program of so many ops, each with a constant."""
    lines = []
    for i in range(count // 2):
        before = f"y{i - 1}" if i else "x"
        lines.append(
            f'tensor<fp32, [2]> c{i} = const()[name = string("c{i}"), val = tensor<fp32, [2]>([0x1p+0, {i}])];'
        )
        lines.append(f'tensor<fp32, [2]> y{i} = add(x = {before}, y = c{i})[name = string("y{i}")];')
    return program(*lines, outputs=f"y{count // 2 - 1}")


def test_reading_is_linear_in_the_number_of_ops() -> None:
    assert_linear(read_mil, many_ops(200), many_ops(400))
    text = many_ops(2_000)
    mil_text = read_mil(text)
    assert isinstance(mil_text, MilText)
    assert write_mil(mil_text.program).count("\n") == text.count("\n")
