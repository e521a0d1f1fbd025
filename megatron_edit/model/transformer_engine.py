"""Whether Transformer Engine can be used here, found out without importing it.

The bare `transformer-engine` package installs anywhere and then makes the first import of megatron-core fail,
with an error that does not say which import that was for nor that the package can go. So this is asked before
megatron-core is imported. This file imports neither torch nor megatron-core.
"""

from __future__ import annotations

from importlib.util import find_spec


class TransformerEngineError(ValueError):
    """Transformer Engine was asked for and cannot be used, or it stands in the way."""


def transformer_engine_state() -> str:
    """One of "absent", "bare" (installed without its PyTorch part) and "present"."""
    if find_spec("transformer_engine") is None:
        return "absent"
    return "present" if find_spec("transformer_engine_torch") is not None else "bare"


def check_transformer_engine(transformer_impl: str) -> None:
    """Raises TransformerEngineError when `transformer_impl`, "local" or "transformer_engine", cannot work."""
    state = transformer_engine_state()
    if state == "bare":
        raise TransformerEngineError(
            "The package transformer-engine is installed without its PyTorch part, and megatron-core cannot "
            "be imported beside it. Remove it (pip uninstall transformer-engine), or complete it on a "
            'machine with CUDA (pip install --no-build-isolation "transformer-engine[pytorch]").'
        )
    if state == "absent" and transformer_impl == "transformer_engine":
        raise TransformerEngineError(
            "--transformer-impl transformer_engine: Transformer Engine is not installed. Install the extra "
            "`te` on a machine with CUDA, or use --transformer-impl local."
        )
