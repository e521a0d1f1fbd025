"""Inverse frequencies of the rotary position embedding, from the config.

megatron-core scales too, but with an original length of 8192 written into its code and, for linear scaling,
through another path; here one function gives the frequencies of every kind and the model's are set to them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_edit.config.resolved import ResolvedModel


def rotary_inverse_frequencies(model: ResolvedModel) -> Tensor:
    """Angles per position, in radians, of each pair of channels: fp32 [kv_channels / 2].

    - "none": base^(-2i/D), arXiv 2104.09864.
    - "linear": divided by the factor, arXiv 2306.15595 (position interpolation).
    - "llama3": wavelengths above original length / low_freq_factor are stretched by the factor, those below
      original length / high_freq_factor stay, and between them the two frequencies are blended linearly in
      (original length / wavelength); as in the Llama 3.1 release.

    Raises ValueError for a factor below 1 or, with llama3, frequency factors that leave no band between them.
    """
    exponents = torch.arange(0, model.kv_channels, 2, dtype=torch.float32) / model.kv_channels
    frequencies = 1.0 / model.rotary_base**exponents
    if model.rope_scaling_type == "none":
        return frequencies
    factor = model.rope_scaling_factor
    if factor < 1:
        raise ValueError(f"--rope-scaling-factor {factor} shrinks the context; give 1 or more")
    if model.rope_scaling_type == "linear":
        return frequencies / factor
    assert model.rope_scaling_type == "llama3", model.rope_scaling_type
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if not low < high:
        raise ValueError(
            f"--rope-scaling-low-freq-factor {low} must be below --rope-scaling-high-freq-factor {high}; "
            "Llama 3.1 has 1 and 4"
        )
    turns = model.rope_scaling_original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # share that is not stretched
    return frequencies * (kept + (1 - kept) / factor)
