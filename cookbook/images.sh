#!/usr/bin/env bash
# A model that reads numbers from pictures, on a laptop: cookbook/images.md.
set -euo pipefail
python cookbook/images.py write ${LINES_TO_LEARN:-}
mjax train --config configs/quickstart_llava.yaml "$@"
python cookbook/images.py count
mjax generate --ckpt runs/quickstart_llava --tokenizer byte --no-bos --max-new-tokens 4 --temperature 0 \
    --image runs/digits/1500_0.png --image runs/digits/1501_0.png --prompt '<image><image>='
