#!/usr/bin/env bash
# Continued pretraining of a published model on a text of yours: cookbook/continued.md.
#   MODEL=HuggingFaceTB/SmolLM2-135M TEXT='notes/*.md' bash cookbook/continued.sh train.steps=1000
set -euo pipefail
export MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M} TEXT=${TEXT:-docs/*/*.md}
export TOKENIZER=${TOKENIZER:-$MODEL}
RUN=runs/continued
mkdir -p runs
# The sizes of the model, as a config that has that of the run as its base.
{ mjax convert config --hf "$MODEL"; echo "base: [../cookbook/continued.yaml]"; } > runs/continued.yaml
mjax train --config runs/continued.yaml "$@"
mjax evaluate perplexity --ckpt "$MODEL" --file "${HELD_OUT:-CONTRIBUTING.md}"   # before
mjax evaluate perplexity --ckpt $RUN@best --file "${HELD_OUT:-CONTRIBUTING.md}"  # after
mjax convert export --ckpt $RUN@best --hf $RUN/hf
