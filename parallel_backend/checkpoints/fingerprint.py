"""A model's fingerprint: whether two machines have the same files, without reading all of their bytes.

Models of one kind have equal headers and sizes, so values are sampled.
"""

import hashlib

from parallel_backend.core.short_text import short

from .checkpoint import Checkpoint

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Samples of each file, evenly spread, and the bytes of each. Fine-tuned models differ nearly everywhere."""


def fingerprint(checkpoint: Checkpoint) -> str:
    """Digest of the files' sizes and samples, not of their names. ValueError if a file cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted({entry.file for entry in checkpoint.entries.values()}):
        try:
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                for sample in range(SAMPLES):
                    file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise ValueError(f"model_name: {short(path.name)} cannot be read ({short(error)}).") from error
    return digest.hexdigest()


def check_fingerprint(checkpoint: Checkpoint, expected: str) -> None:
    """ValueError if the fingerprint of this machine's files is not `expected`."""
    if fingerprint(checkpoint) != expected:
        raise ValueError(
            f"model_name: {short(checkpoint.path, 300)} differs between this machine and ComfyUI's machine. Copy the "
            "file, or share the folder."
        )
