"""`python -m mjax.export --ckpt X --out DIR [options]`: a model as programs that jax alone runs.

    python -m mjax.export --ckpt CKPT --out DIR --batch 1,8 --length 1024,8192
    python DIR/run.py --ids 1,2,3 --max-new-tokens 32        # needs jax, not mjax

DIR holds StableHLO programs for each bucket of batch and cache length, the weights, manifest.json
with the calling convention, and the tokenizer (mjax/export/programs.py says how they fit together).
"""

import argparse

from mjax.config.languages.paths import as_path, path_text
from mjax.errors import CommandParser, read_numbers, run_cli


def main(argv: list[str] | None = None) -> None:
    args = _export_arguments(argv)
    from mjax.checkpoint.base.companion_files import (
        UNREAD,
        end_ids,
        read_folder,
        read_side_files,
        side_folders,
        tokenizer_dir,
    )
    from mjax.data.base.tokenizer import load_tokenizer
    from mjax.export.programs import export_model
    from mjax.interop.sources import source_of

    source, tokenizer = source_of(args.ckpt), tokenizer_dir(args.ckpt)
    not_ours = "config.json", UNREAD  # are of the layout of Hugging Face
    folder = next(filter(read_folder, side_folders(args.ckpt)), None)
    manifest = export_model(
        source,
        args.out,
        batches=read_numbers("--batch", args.batch),
        lengths=read_numbers("--length", args.length),
        platforms=args.platforms.split(","),
        dtype=args.dtype,
        block=args.block,
        eos=end_ids(folder, None if tokenizer is None else load_tokenizer(tokenizer)),
        extras={k: v for k, v in read_side_files(args.ckpt).items() if k not in not_ours},
    )
    names = ", ".join(f"{b['batch']}x{b['length']}" for b in manifest["buckets"])
    print(f"{args.out}: prefill and decode for {names} as {args.dtype}")


def _export_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser("export", description="Export a model.")
    about = "any folder that mjax reads, or org/name on the hub"
    parser.add_argument("--ckpt", type=path_text, required=True, help=about)
    parser.add_argument("--out", type=as_path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--batch", default="1", metavar="B,...", help="default: 1")
    lengths = "slots of a cache: prompt, padding and new tokens (default: 1024)"
    parser.add_argument("--length", default="1024", metavar="T,...", help=lengths)
    block = "tokens of a row in one prefill call (default: 128)"
    parser.add_argument("--block", type=int, default=128, metavar="S", help=block)
    platforms = "what the programs run on (default: cpu,cuda)"
    parser.add_argument("--platforms", default="cpu,cuda", help=platforms)
    kinds = ["float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", choices=kinds, default="bfloat16", help="of the weights")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(main)
