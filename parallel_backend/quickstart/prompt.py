"""Fixed encoding of a quickstart prompt such as `3 1 4 1`; nothing is learned.

Symbols: 0..9 the digits, 10 a blank cell (`_`, and cells that the prompt leaves out), 11 null (unconditional).
The order is the reading order: top left, top right, bottom left, bottom right.
"""

import torch

CELLS = 4
BLANK, NULL = 10, 11
SYMBOLS = 12
CONTEXT_WIDTH, POOLED_WIDTH = 32, 16

# A token has two ones among 32 dimensions. The factor makes its norm sqrt(32), that of a unit-variance vector of the
# same width, which is what the model's input layers are initialised for.
TOKEN_SCALE = 4.0
POOLED_SCALE = 1.0


def symbols(text: str) -> list[int]:
    """Return the four symbols of a prompt. White space and commas are ignored: `3141` equals `3 1, 4 1`. Text without any
    symbol is the unconditional prompt: four NULL symbols. Raises ValueError on anything but digits and `_`."""
    marks = [mark for mark in text if not mark.isspace() and mark != ","]
    bad = sorted({mark for mark in marks if mark not in "0123456789_"})
    if bad or len(marks) > CELLS:
        reason = f"it has {', '.join(map(repr, bad))}" if bad else f"it has {len(marks)} symbols"
        raise ValueError(
            f"text: at most {CELLS} symbols are allowed, each a digit 0-9 or '_' for a blank cell, such as '3 1 4 1'; "
            f"an empty text is the unconditional prompt; {reason}"
        )
    if not marks:
        return [NULL] * CELLS
    return [BLANK if mark == "_" else int(mark) for mark in marks] + [BLANK] * (CELLS - len(marks))


def encode_symbols(symbols_BC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode symbols [B, 4] int64 as context [B, 4, 32] and pooled [B, 16], both float32.

    A text token is the one-hot of its symbol (dims 0..11) and of its cell (dims 12..15). The pooled vector counts the
    symbols: it says which digits are wanted, but only the text tokens say where.
    """
    batch = symbols_BC.shape[0]
    which = torch.nn.functional.one_hot(symbols_BC, SYMBOLS).float()
    where = torch.eye(CELLS).expand(batch, CELLS, CELLS)
    context = torch.zeros(batch, CELLS, CONTEXT_WIDTH)
    context[..., :SYMBOLS] = which
    context[..., SYMBOLS : SYMBOLS + CELLS] = where
    pooled = torch.zeros(batch, POOLED_WIDTH)
    pooled[:, :SYMBOLS] = which.sum(1)
    return context * TOKEN_SCALE, pooled * POOLED_SCALE


def encode_prompt(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a prompt's text as context [1, 4, 32] and pooled [1, 16], both float32."""
    return encode_symbols(torch.tensor([symbols(text)]))
