#!/usr/bin/env bash
# Adapters for Llama 3.1 8B on one GPU, from a file of conversations to a server: cookbook/lora_8b.md.
#   CHATS=chats.jsonl bash cookbook/lora_8b.sh train.steps=500
set -euo pipefail
CONFIG=${CONFIG:-configs/recipes/lora_llama3_1_8b.yaml} # qlora_llama3_1_8b.yaml: a base of 4 bits
RUN=runs/lora_8b
keys=(run.dir=$RUN "data.conversations.path=${CHATS:-chats.jsonl}" "$@")
mjax sft --config "$CONFIG" "${keys[@]}" --preview 1
mjax sft --config "$CONFIG" "${keys[@]}"
mjax evaluate answers --ckpt $RUN@best --file "${HELD_OUT:-${CHATS:-chats.jsonl}}" --limit 100
mjax convert extract $RUN@best $RUN/adapter      # PEFT's files
mjax convert export --ckpt $RUN@best --hf $RUN/hf # merged
