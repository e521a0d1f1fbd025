"""Model sizes for --model-size. Each row is a set of the model's settings; flags and YAML keys win over it.

Sources: llama2-7b and llama3-8b are the configurations that Meta published with the weights (Llama 2, arXiv
2307.09288; Llama 3, arXiv 2407.21783), 7b that of LLaMA (arXiv 2302.13971). 350m and 1b have the shape that
is common in published pre-training comparisons on C4 (GaLore, arXiv 2403.03507: 24 layers of 1024 and of
2048); 1b's MLP of 5461 is rounded up to a multiple of 128 (ours), as it cannot be split. 3b and tiny are
ours. The EDiT paper trains Llamas of 350M, 1B, 3B and 7B; its exact shapes were not at hand, so these need
not be the same.
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "num_layers": 4,
        "hidden_size": 128,
        "ffn_hidden_size": 384,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "seq_length": 256,
        "untie_embeddings_and_output_weights": True,
    },
    "350m": {
        "num_layers": 24,
        "hidden_size": 1024,
        "ffn_hidden_size": 2736,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "seq_length": 2048,
        "untie_embeddings_and_output_weights": True,
    },
    "1b": {
        "num_layers": 24,
        "hidden_size": 2048,
        "ffn_hidden_size": 5504,
        "num_attention_heads": 32,
        "num_query_groups": 32,
        "seq_length": 2048,
        "untie_embeddings_and_output_weights": True,
    },
    "3b": {
        "num_layers": 32,
        "hidden_size": 2560,
        "ffn_hidden_size": 6912,
        "num_attention_heads": 32,
        "num_query_groups": 32,
        "seq_length": 2048,
        "untie_embeddings_and_output_weights": True,
    },
    "7b": {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 32,
        "num_query_groups": 32,
        "seq_length": 2048,
        "norm_epsilon": 1e-6,
        "untie_embeddings_and_output_weights": True,
    },
    "llama2-7b": {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 32,
        "num_query_groups": 32,
        "seq_length": 4096,
        "norm_epsilon": 1e-5,
        "untie_embeddings_and_output_weights": True,
    },
    "llama3-8b": {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "seq_length": 8192,
        "norm_epsilon": 1e-5,
        "rotary_base": 500000.0,
        "untie_embeddings_and_output_weights": True,
    },
}
