"""Text from files and callers for error messages: in one line, clipped, and without control characters."""

MOST = 80
"""Maximum characters of a name or a value. The longest keys of known models have about as many."""


def short(value: object, most: int = MOST) -> str:
    """`value` as text of one line, cut to `most` characters. Characters that Python does not count as printable are escaped:
    control characters, line ends, marks of text direction."""
    text = str(value)
    clean = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text[: most + 1])
    return clean if len(clean) <= most else f"{clean[:most]}..."
