"""Sizes that no run has: refused before anything is made of them, in one line.

They are slips of the hand. Lists as long as a count of layers, or strings as long as the product of
a pattern's repeats, would else fill the memory of the host before a rule could speak.
"""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from mjax.errors import UserError

MOST_REPEATS = 1_000_000  # the product of all counts in a pattern
# By the last name of a key. Each is a hundred times what the largest known run has, or more.
LARGEST_SIZES = MappingProxyType(
    {
        "vocab_size": 2**26,
        "hidden_size": 2**24,
        "intermediate_size": 2**24,
        "moe_intermediate_size": 2**24,
        "shared_expert_intermediate_size": 2**24,
        "head_dim": 2**20,
        "q_lora_rank": 2**24,
        "kv_lora_rank": 2**24,
        "qk_nope_head_dim": 2**20,
        "qk_rope_head_dim": 2**20,
        "v_head_dim": 2**20,
        "num_hidden_layers": 10_000,
        "num_attention_heads": 2**16,
        "num_key_value_heads": 2**16,
        "num_experts": 2**20,
        "seq_length": 2**28,
        "global_batch_size": 2**28,
        "micro_batch_size": 2**28,
        "eval_steps": 2**28,
        "steps": 10**12,
        "virtual_stages": 10_000,
        "prefetch": 10_000,
        "workers": 1024,
        "sample_tokens": 2**24,
        **dict.fromkeys(("dp", "tp", "pp", "cp", "ep"), 2**20),
    }
)
PATTERNS = ("layer_pattern", "pipeline_layout", "remat")


def require_sane_sizes(tree: Mapping, places: Mapping[str, str], prefix: str = "") -> None:
    """Raise `UserError` for the first key of a config's tree that is beyond all measure."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        where = f" ({places[key]})" if key in places else ""
        if isinstance(value, Mapping):
            require_sane_sizes(value, places, f"{key}.")
        elif isinstance(value, (int, float)) and value > LARGEST_SIZES.get(name, math.inf):
            most = LARGEST_SIZES[name]
            raise UserError(f"{key}={value}: must be at most {most:,}; lower it{where}")
        elif isinstance(value, str) and name in PATTERNS:
            repeats = math.prod(map(int, re.findall(r"\*\s*(\d{1,15})", value)))
            if repeats > MOST_REPEATS or re.search(r"\d{16}", value):
                raise UserError(
                    f"{key}={shortened(value)!r}: repeats more than {MOST_REPEATS:,} times; lower "
                    f"its counts{where}"
                )


def shortened(value: str, most: int = 200) -> str:
    """A text that fits in a line."""
    return value if len(value) <= most else f"{value[:most]}..."
