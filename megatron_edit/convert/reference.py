"""Logits and layer outputs of transformers, in a process of its own: python -m megatron_edit.convert.reference.

The CPU platform replaces attributes of torch, which transformers must not see; so `verify_conversion` starts this file
as another process. It imports nothing of this program.
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    """Reads token ids [B][S] as JSON; writes fp32 logits [B, S, V], the outputs of the layers [B, S, H], and "spread":
    the largest absolute difference of the logits between two ways of transformers to compute the attention."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    found: dict[str, torch.Tensor] = {}

    def keep(number: int):  # type: ignore[no-untyped-def]
        def hook(module, inputs, output):  # type: ignore[no-untyped-def]
            found[f"layer.{number}"] = (output[0] if isinstance(output, tuple) else output).contiguous()

        return hook

    hooks = [layer.register_forward_hook(keep(number)) for number, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        tokens = torch.tensor(json.loads(arguments.tokens.read_text()))
        found["logits"] = model(tokens, use_cache=False).logits.float().contiguous()
        for hook in hooks:
            hook.remove()
        model.config._attn_implementation = "eager"
        again = model(tokens, use_cache=False).logits.float()
    found["spread"] = (again - found["logits"]).abs().max()
    save_file(found, arguments.output)


if __name__ == "__main__":
    main()
