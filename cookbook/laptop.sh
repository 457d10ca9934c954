#!/usr/bin/env bash
# From a text to a model that one talks to, on a laptop: cookbook/laptop.md. Run it in the root of
# the checkout, after `pip install -e '.[serve]'`. What is done already is not done again.
set -euo pipefail
PORT=${PORT:-8000}
MODEL=runs/sft_quickstart@best

mjax train --config configs/quickstart.yaml                          # tokenizer and pretraining
python -m tools.chat_lines runs/quickstart --out runs/chat_lines     # conversations
mjax sft --config configs/sft_quickstart.yaml                        # fine-tuning
mjax evaluate answers --ckpt $MODEL --file runs/chat_lines/held_out.jsonl --limit 200 --max-new-tokens 24

mjax serve $MODEL --port "$PORT" &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
until curl --fail --silent "http://127.0.0.1:$PORT/ready" > /dev/null; do
    kill -0 $server # ends the script if the server has ended
    sleep 1
done
for line in "def load_tokenizer(path):" "class SyntaxTree(Node):" "import zlib"; do
    echo "you: $line"
    echo "$line" | mjax chat "http://127.0.0.1:$PORT" --temperature 0
done
if [ -t 0 ]; then # a terminal: go on yourself
    echo "Your turn: a line of Python, Ctrl-D to end. In the browser: http://127.0.0.1:$PORT/"
    mjax chat "http://127.0.0.1:$PORT" --temperature 0
fi
