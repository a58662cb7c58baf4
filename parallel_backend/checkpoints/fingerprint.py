"""Whether two machines have the same model, without reading all of it. Others of its kind have the same header and size."""

import hashlib

from .checkpoint import Checkpoint

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Read of each file, evenly spread: fine-tuned models differ nearly everywhere."""


def fingerprint(checkpoint: Checkpoint) -> str:
    """Of its files' sizes and samples of what they hold; their names do not count. ValueError if one cannot be read."""
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
            raise ValueError(f"model_name: {path.name} cannot be read ({error}).") from error
    return digest.hexdigest()


def check_fingerprint(checkpoint: Checkpoint, expected: str) -> None:
    """ValueError if this machine's files are others than those that `expected` was made of."""
    if fingerprint(checkpoint) != expected:
        raise ValueError(
            f"model_name: {checkpoint.path} is not the same on this machine as on ComfyUI's. Copy it there, or share the "
            "folder."
        )
