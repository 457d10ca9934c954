#!/usr/bin/env bash
# A model of 124M parameters on one GPU, with its evaluation: cookbook/gpt2_124m.md.
#   TEXT='corpus/*.txt' HELD_OUT=other.txt bash cookbook/gpt2_124m.sh train.steps=2000
set -euo pipefail
RUN=runs/gpt2_124m_text
mjax train --config cookbook/gpt2_124m.yaml "$@"
mjax evaluate perplexity --ckpt $RUN@best --file "${HELD_OUT:-tools/curves.py}"
mjax generate --ckpt $RUN@best --prompt "def main():" --max-new-tokens 60
mjax report $RUN --out $RUN/report.html
