#!/usr/bin/env bash
# A small mixture of experts, from text to a folder that transformers reads: cookbook/small_moe.md.
set -euo pipefail
RUN=runs/small_moe
mjax train --config cookbook/small_moe.yaml "$@"
mjax evaluate perplexity --ckpt $RUN --file tools/curves.py
mjax generate --ckpt $RUN --prompt "def main():" --max-new-tokens 40
mjax convert export --ckpt $RUN --hf $RUN/hf
