"""Ways to damage values of JSON, and bytes."""

import json
import random
from typing import Any

NUMBERS = (0, 1, -1, 2, 7, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63, 2**64, 2**70, 2**127, 2**128, 10**400)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e9, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "0", "NaN", "..", "\0", "ü", "\ud800", "x" * 5000, "__class__", "$type", "float32", "nonsense")


def number(rng: random.Random) -> Any:
    return rng.choice((rng.choice(NUMBERS), -rng.choice(NUMBERS), rng.randrange(10), rng.choice(FLOATS)))


def value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can be."""
    kind = rng.randrange(7 if depth < 4 else 4)
    if kind == 0:
        return number(rng)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice((None, True, False))
    if kind == 3:
        return rng.randrange(5)
    if kind == 4:
        return {rng.choice(TEXTS): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [value(rng, depth + 1) for _ in range(rng.randrange(5))]


def places(whole: Any) -> list[tuple[Any, Any]]:
    """Every (container, index) inside."""
    found, rest = [], [whole]
    while rest:
        at = rest.pop()
        items = enumerate(at) if isinstance(at, list) else at.items() if isinstance(at, dict) else ()
        for index, item in items:
            found.append((at, index))
            rest.append(item)
    return found


def change(rng: random.Random, whole: Any) -> Any:
    """The same with one to three places inside changed, taken away or doubled."""
    whole = json.loads(json.dumps(whole))
    for _ in range(rng.randint(1, 3)):
        found = places(whole)
        if not found:
            return value(rng)
        at, index = rng.choice(found)
        how = rng.randrange(5)
        if how == 0:
            del at[index]
        elif how == 1 and isinstance(at, list):
            at.insert(index, at[index])
        elif how == 2 and isinstance(at[index], int):
            at[index] = number(rng)
        elif how == 3 and isinstance(at, dict):
            at[rng.choice(TEXTS)] = at.pop(index)
        else:
            at[index] = value(rng)
    return whole


def text(rng: random.Random, whole: Any) -> bytes:
    """JSON that is damaged as a value or, at times, as bytes."""
    written = json.dumps(change(rng, whole)).encode()
    return bytes_of(rng, written) if rng.random() < 0.3 else written


def bytes_of(rng: random.Random, whole: bytes) -> bytes:
    """The same with some bytes changed, put in, or cut off."""
    out = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        how, at = rng.randrange(5), rng.randrange(len(out) + 1)
        if how == 0:
            del out[at:]
        elif how == 1:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif how == 2:
            del out[at : at + rng.randrange(1, 9)]
        elif how == 3:
            out[at : at + 8] = rng.choice((bytes(8), b"\xff" * 8, b"\xff" * 7 + b"\x7f", rng.randbytes(8)))
        else:
            out[at : at + 1] = bytes((rng.randrange(256),))
    return bytes(out)
