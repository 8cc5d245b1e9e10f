"""How much memory a device has left."""

from __future__ import annotations

import os

import torch


def free_bytes(device: torch.device) -> int:
    """What an allocation could get: on a GPU what torch's allocator holds unused too. No synchronisation."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
