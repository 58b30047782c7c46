"""The transformers side of `offload.py`: accelerate's disk offload on the same folder. Runs as a child process of it; needs both packages.
"""

import os
import tempfile
import time
from pathlib import Path


def accelerate(folder: Path, memory_limit: int, tokens: int) -> dict[str, float]:
    """Decode token by token with `memory_limit` bytes of weights in memory and the rest left in the checkpoint, which is read in every
    pass. The caller has put this process where memory is short."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(dir=folder.parent) as spill:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="auto", max_memory={"cpu": memory_limit},
                                                     offload_folder=spill)
        devices = [str(device) for device in model.hf_device_map.values()]
        on_disk = sum(parameter.numel() * 2 for parameter in model.parameters() if parameter.device.type == "meta")
        seconds = []
        with torch.inference_mode():
            cache = model(torch.arange(100, 132)[None], use_cache=True).past_key_values
            for token in range(tokens):
                started = time.perf_counter()
                cache = model(torch.tensor([[200 + token]]), past_key_values=cache, use_cache=True).past_key_values
                seconds.append(time.perf_counter() - started)
        median_seconds = sorted(seconds)[len(seconds) // 2]
        return {"tokens_per_s": 1 / median_seconds, "disk_gb": on_disk / 1e9, "read_gbps": on_disk / median_seconds / 1e9,
                "layers_on_disk": devices.count("disk")}
