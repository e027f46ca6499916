"""Core AI: Apple's format for neural networks since iOS 27, `pip install 'anesurgery[coreai]'`.

| to Core AI | |
|---|---|
| `translating` | `to_coreai`: a model of Core ML becomes an `.aimodel`, op by op, by the table of `lowerings` |
| `values` | the tensors of a file that is written, for which torch's functions stand too |

| from Core AI | |
|---|---|
| `asset` | what must be true of a folder; its large weights |
| `reading` | a file becomes an ML Program, op by op, by the table of `lifts`; `to_coreml`: the package of it |
| `rules` | what is known of models of Core AI alone, and `lint` |

| Apple's code | |
|---|---|
| `toolkit` | the one door to `coreai-core` |
| `running`, `child` | its runtime, in a process of its own: `engine="coreai"` |

`names` holds the names that both directions share. An op means what the interpreter says: its
formulas are given `values.Value`s, which write what torch would compute.
"""
