"""Texts as samples for a model that reads a fixed number of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anesurgery.errors import LoadError, SurgeryError
from anesurgery.mil import Array

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
