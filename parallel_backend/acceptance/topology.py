"""How GPUs are connected, in the terms of `nvidia-smi topo -m`, from the same library of the driver (NVML)."""

from typing import Any

import torch

from .findings import NotLookedAt

WORDS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's nearest common ancestor of two devices -> term: one PCIe switch, several, host bridge, socket, whole system."""


def topology(count: int) -> list[list[str]]:
    """By device, its connection to each device: X itself, NV4 four NVLinks, else a word of WORDS.

    NotLookedAt without NVIDIA GPUs, or without Python's access to NVML.
    """
    if count == 0 or torch.version.cuda is None:
        raise NotLookedAt("there is no NVIDIA GPU")
    try:
        import pynvml
    except ImportError:
        raise NotLookedAt(
            "pip install nvidia-ml-py in this environment, or add the output of nvidia-smi topo -m to the report"
        ) from None
    try:
        pynvml.nvmlInit()
        try:
            # NVML counts all of the machine's devices, torch those that this process may see.
            uuids = (str(torch.cuda.get_device_properties(index).uuid) for index in range(count))
            handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}") for uuid in uuids]
            return [[_word(pynvml, one, two) for two in handles] for one in handles]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NotLookedAt(f"NVML says {error}") from error


def _word(pynvml: Any, one: Any, two: Any) -> str:
    if one is two:
        return "X"
    if links := _nv_links(pynvml, one, two):
        return f"NV{links}"
    return WORDS.get(pynvml.nvmlDeviceGetTopologyCommonAncestor(one, two), "?")


def _nv_links(pynvml: Any, one: Any, two: Any) -> int:
    """NVLinks from one device to the other. NVML names a switch as the remote device, so links to a switch always count."""
    theirs = pynvml.nvmlDeviceGetPciInfo(two).busId
    count = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(one, link):
                continue
            kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(one, link)
            switch = kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            count += switch or pynvml.nvmlDeviceGetNvLinkRemotePciInfo(one, link).busId == theirs
        except pynvml.NVMLError:  # the device has no such link
            break
    return count
