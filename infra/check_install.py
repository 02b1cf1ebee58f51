"""Refuse an installation that imports would only reveal later, with a riddle."""

import importlib.util
import sys

import torch

NOT_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")

if torch.version.cuda is None:
    found = [name for name in NOT_BESIDE_CPU_TORCH if importlib.util.find_spec(name)]
    if found:
        sys.exit(
            f"{', '.join(found)} cannot load beside the CPU build of torch, and then breaks transformers' model "
            f"imports and vLLM: {sys.executable} -m pip uninstall -y {' '.join(found)}"
        )
