"""What files and callers say, as errors repeat it: in one line, without signs that act on a terminal, and clipped."""

MOST = 80
"""Characters of a name or a value. The longest keys of known models have about as many."""


def short(value: object, most: int = MOST) -> str:
    """`value` as text of one line, cut to `most` characters.

    Escaped is what Python does not count as printable: control signs, line ends, marks that turn the direction of text.
    """
    text = str(value)
    clean = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text[: most + 1])
    return clean if len(clean) <= most else f"{clean[:most]}..."
