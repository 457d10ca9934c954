"""`python -m mjax.convert COMMAND`: weights, configs and adapters in and out of mjax.

    python -m mjax.convert import --hf DIR --out CKPT          # or org/name, or --megatron DIR
    python -m mjax.convert export --ckpt CKPT --hf DIR         # --dtype float8_block: for vLLM
    python -m mjax.convert config --hf DIR_OR_CONFIG_JSON      # prints the `model:` part of a YAML;
                                                               # or --megatron DIR, --ckpt RUN
    python -m mjax.convert export --ckpt RUN --megatron DIR    # Megatron-LM's torch_dist
    python -m mjax.convert merge BASE ADAPTER OUT              # of a run, or a folder of PEFT
    python -m mjax.convert unmerge MERGED OUT                  # the base again, bit for bit
    python -m mjax.convert extract RUN OUT                     # a run's adapters as PEFT's folder
    python -m mjax.convert push RUN_OR_FOLDER org/name         # to the Hugging Face hub
    python -m mjax.convert families                            # what can be converted

CKPT is a folder that `checkpoint.init_from`, `mjax.generate.__main__` and `mjax.from_pretrained`
read; an export takes any mjax checkpoint or run folder. Everything is written under a temporary
name and renamed last. `--verify` compares logits with transformers, where that is installed.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path

import numpy as np

from mjax.config.languages.paths import as_path, path_text, require_files
from mjax.config.schema.model import ModelConfig
from mjax.errors import CommandParser, UserError, or_user_error, run_cli
from mjax.json_file import read_json

_NARROW = ["float16", "float8", "float8_block"]
BOUND = 2e-4  # of --verify: largest difference of logits over the largest logit


def main() -> int:
    args = _parser().parse_args()
    commands = {"import": _import, "export": _export, "config": _config}
    commands |= {"merge": _merge, "unmerge": _unmerge, "extract": _extract}
    commands |= {"push": _push, "families": _families}
    return commands[args.command](args)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("convert", description="Convert weights.")
    commands = parser.add_subparsers(dest="command", required=True)
    into = commands.add_parser("import", help="into an mjax checkpoint")
    source = into.add_mutually_exclusive_group(required=True)
    about = "Hugging Face folder, or org/name on the hub"
    source.add_argument("--hf", type=path_text, metavar="DIR_OR_NAME", help=about)
    about = "Megatron-LM's checkpoint: torch_dist, torch or fsdp_dtensor"
    source.add_argument("--megatron", type=as_path, metavar="DIR", help=about)
    _add_revision(into)
    _add_text(into)
    into.add_argument("--out", type=as_path, required=True, metavar="CKPT", help="folder to make")
    about = "with --megatron: a run folder that goes on, with optimizer and place in the data"
    into.add_argument("--with-optimizer", action="store_true", help=about)
    out = commands.add_parser("export", help="to a Hugging Face folder, or Megatron's")
    about = "a run or a checkpoint; RUN@best: its step of lowest held-out loss; RUN@160: a step"
    out.add_argument("--ckpt", type=path_text, required=True, metavar="CKPT", help=about)
    _add_license(out)
    goal = out.add_mutually_exclusive_group(required=True)
    goal.add_argument("--hf", type=as_path, metavar="DIR", help="folder to make")
    goal.add_argument("--megatron", type=as_path, metavar="DIR", help="torch_dist folder to make")
    impls = ["transformer_engine", "local"]
    about = "whose modules' names Megatron's folder has"
    out.add_argument("--transformer-impl", choices=impls, default=impls[0], help=about)
    about = "with --megatron: an iteration that goes on, with optimizer and place in the data"
    out.add_argument("--with-optimizer", action="store_true", help=about)
    about = "with --with-optimizer: for Megatron with --expert-model-parallel-size above 1"
    out.add_argument("--expert-parallel", action="store_true", help=about)
    out.add_argument("--max-shard-gb", type=float, default=5.0, help="size of one file")
    for one, default in ((into, "float32"), (out, "bfloat16")):
        kinds = ["float32", "bfloat16", *(_NARROW if one is out else [])]
        one.add_argument("--dtype", choices=kinds, default=default, help=f"default: {default}")
        one.add_argument("--verify", action="store_true", help="logits against transformers")
    config = commands.add_parser("config", help="print a config of a model or of Megatron's run")
    source = config.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--hf", type=path_text, metavar="DIR_OR_JSON", help="its model; also org/name"
    )
    source.add_argument("--megatron", type=as_path, metavar="DIR", help="a checkpoint's whole run")
    source.add_argument("--ckpt", type=path_text, metavar="RUN", help="an mjax run or checkpoint")
    _add_revision(config)
    _add_text(config)
    _add_adapter_commands(commands)
    _add_hub_commands(commands)
    return parser


def _add_text(parser: argparse.ArgumentParser) -> None:
    about = "the text alone, of Qwen3.5's files with a tower, which stays aside for an export"
    parser.add_argument("--text", action="store_true", help=about)


def _add_revision(parser: argparse.ArgumentParser) -> None:
    about = "branch, tag or commit on the hub; or org/name@REV, as all commands take it"
    parser.add_argument("--revision", metavar="REV", help=about)


def _add_license(parser: argparse.ArgumentParser) -> None:
    about = "for the model card: the hub's word, such as apache-2.0; default: unknown"
    parser.add_argument("--license", metavar="WORD", help=about)


def _add_hub_commands(commands: argparse._SubParsersAction) -> None:
    push = commands.add_parser("push", help="to the Hugging Face hub")
    about = "a Hugging Face folder as it is; or what `export` takes, exported as bfloat16 first"
    push.add_argument("source", type=path_text, metavar="RUN_OR_FOLDER", help=about)
    push.add_argument("name", metavar="ORG/NAME", help="on the hub; made if it is missing")
    push.add_argument("--private", action="store_true", help="if it is made: for its owners alone")
    push.add_argument("--revision", metavar="BRANCH", help="default: main")
    push.add_argument("--message", metavar="TEXT", help="of the commit")
    _add_license(push)
    families = commands.add_parser("families", help="the published models that are read")
    families.add_argument("--markdown", action="store_true", help="as in docs/models/families.md")


def _add_adapter_commands(commands: argparse._SubParsersAction) -> None:
    merge = commands.add_parser("merge", help="adapters into their base, in the base's format")
    merge.add_argument("base", type=path_text, metavar="BASE", help="the weights they belong to")
    about = "a run with adapters, or PEFT's folder"
    merge.add_argument("adapter", type=path_text, metavar="ADAPTER", help=about)
    merge.add_argument("out", type=as_path, metavar="OUT", help="folder to make")
    kinds = ["float32", "bfloat16", "float16"]
    merge.add_argument("--dtype", choices=kinds, help="default: the dtype of the base")
    unmerge = commands.add_parser("unmerge", help="the base of merged weights, bit for bit")
    unmerge.add_argument("merged", type=as_path, metavar="MERGED", help="what merge wrote")
    unmerge.add_argument("out", type=as_path, metavar="OUT", help="folder to make")
    extract = commands.add_parser("extract", help="the adapters of a run as PEFT's folder")
    extract.add_argument("run", type=as_path, metavar="RUN", help="a run with adapters, or a step")
    extract.add_argument("out", type=as_path, metavar="OUT", help="folder to make")


def _import(args: argparse.Namespace) -> int:
    from mjax.checkpoint.base.companion_files import read_folder
    from mjax.checkpoint.base.hub import model_folder
    from mjax.checkpoint.weights import write_weights
    from mjax.interop.megatron.parameters import megatron_source
    from mjax.interop.sources import source_of
    from mjax.models import definition_of

    require_files(args.megatron)
    if args.with_optimizer:
        from mjax.interop.megatron.run_folder import import_run

        if not args.megatron:
            raise UserError("--with-optimizer goes with --megatron: Hugging Face has weights alone")
        if args.dtype != "float32":
            raise UserError("--with-optimizer keeps fp32 masters; leave out --dtype")
        print(import_run(args.megatron, args.out))
        return 0
    if args.verify and args.megatron:
        raise UserError("--verify compares with transformers, which cannot read Megatron's format")
    name = _with_revision(args) if args.hf else None
    source = source_of(name, text=args.text) if name else megatron_source(args.megatron)
    specs = definition_of(source.cfg).specs
    source.check()
    folder = model_folder(name) if name else args.megatron
    write_weights(args.out, source, specs, args.dtype, read_folder(folder) | source.unread())
    print(f"{args.out}: {source.cfg.model_type or 'megatron'} weights as {args.dtype}")
    return verify(args.out, folder, args.dtype) if args.verify else 0


def _export(args: argparse.Namespace) -> int:
    if not 0 < args.max_shard_gb < math.inf:
        raise UserError(f"--max-shard-gb {args.max_shard_gb}: give a number above 0")
    if args.megatron:
        return _export_megatron(args)
    if args.with_optimizer:
        raise UserError("--with-optimizer goes with --megatron: Hugging Face has weights alone")
    if args.verify and args.dtype.startswith("float8"):
        raise UserError("--verify has a bound for exact weights; leave it out with float8")
    size = math.ceil(args.max_shard_gb * 1e9)
    write_hf_folder(args.ckpt, args.hf, args.dtype, size, args.license)
    return verify(args.ckpt, args.hf, args.dtype) if args.verify else 0


def write_hf_folder(
    ckpt: str, folder: Path, dtype: str, max_shard_bytes: int, license: str | None = None
) -> None:
    """Export the weights in `ckpt` to a Hugging Face folder, with a model card, and print a line.

    Raises `UserError` with nothing written.
    """
    from mjax.interop.huggingface.exported_files import side_files
    from mjax.interop.huggingface.families.engine import BALANCE_KEYS, slots
    from mjax.interop.huggingface.files import export
    from mjax.interop.huggingface.model_card import with_card
    from mjax.interop.sources import source_of
    from mjax.models import definition_of

    source = source_of(ckpt)
    source.check()
    cfg, specs = source.cfg, definition_of(source.cfg).specs
    places = slots(cfg, specs)  # names what no family can express, before anything is written
    extras = side_files(cfg, ckpt, dtype, source.unread())
    extras = with_card(extras, cfg, ckpt, license)
    export(source.read, cfg, specs, places, folder, dtype, max_shard_bytes, extras)
    config = json.loads(extras["config.json"])
    print(f"{folder}: {config['architectures'][0]} as {dtype}")
    if cfg.moe.router_aux_loss_coef and 0.0 in (config.get(key) for key in BALANCE_KEYS):
        print(
            "config.json has no balance loss: readers of that family take model.moe."
            f"router_aux_loss_type={cfg.moe.router_aux_loss_type} for another loss"
        )


def _push(args: argparse.Namespace) -> int:
    from mjax.checkpoint.base.hub import import_hub, parse_hub_name
    from mjax.interop.huggingface.push import push_folder

    import_hub()
    require_files(args.source)
    to = parse_hub_name(args.name if args.revision is None else f"{args.name}@{args.revision}")
    if to is None:
        raise UserError(f"{args.name}: give org/name, the model's name on the hub")
    folder = Path(args.source)
    with tempfile.TemporaryDirectory(prefix="mjax-push-") as temporary:
        if not any((folder / f"{kind}config.json").is_file() for kind in ("", "adapter_")):
            folder = Path(temporary) / "model"
            write_hf_folder(args.source, folder, "bfloat16", math.ceil(5e9), args.license)
        print(push_folder(folder, to, args.private, args.message))
    return 0


def _families(args: argparse.Namespace) -> int:
    from mjax.interop.huggingface.published import markdown_table, print_table

    if args.markdown:
        print(markdown_table(), end="")
    else:
        print_table()
    return 0


def _with_revision(args: argparse.Namespace) -> str:
    """--hf with --revision."""
    from mjax.checkpoint.base.hub import hub_name

    if args.revision is None:
        return args.hf
    if hub_name(args.hf) is None or "@" in args.hf:
        raise UserError(f"--revision {args.revision}: --hf {args.hf} is not org/name on the hub")
    return f"{args.hf}@{args.revision}"


def _export_megatron(args: argparse.Namespace) -> int:
    from mjax.checkpoint.base.steps import newest_step
    from mjax.interop.megatron.writing import export_torch_dist
    from mjax.interop.megatron.written_run import run_to_write
    from mjax.interop.sources import source_of

    if args.verify:
        raise UserError("--verify compares with transformers; --megatron reads back what it writes")
    if args.dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype {args.dtype}: torch_dist is written as float32 or bfloat16")
    if args.expert_parallel and not args.with_optimizer:
        raise UserError("--expert-parallel goes with --with-optimizer; weights are the same")
    source = source_of(args.ckpt)
    run = run_to_write(args.ckpt, args.expert_parallel) if args.with_optimizer else None
    of = str(newest_step(Path(args.ckpt)) or args.ckpt)
    export_torch_dist(source, args.megatron, args.dtype, args.transformer_impl, run, of)
    print(f"{args.megatron}: torch_dist for Megatron-LM as {args.dtype}")
    return 0


def _config(args: argparse.Namespace) -> int:
    import yaml

    from mjax.checkpoint.base.hub import model_folder
    from mjax.interop.huggingface.families.engine import config_from_hf
    from mjax.interop.huggingface.families.parts import say_unused
    from mjax.interop.huggingface.families.unread_keys import read_of, text_of
    from mjax.interop.sources import source_of

    given = args.hf or args.megatron or args.ckpt
    require_files(args.megatron)
    if args.megatron:
        from mjax.interop.megatron.run_folder import config_of_run

        groups, lines = config_of_run(args.megatron)
        print("".join(f"# {line}\n" for line in lines), end="")
        print(yaml.safe_dump(groups, sort_keys=False), end="")
        return 0
    name = _with_revision(args) if args.hf else given
    folder = model_folder(name)
    path = folder / "config.json" if folder.is_dir() else folder
    # Files tell of heads in them; those of the hub are not fetched for that.
    has_weights = not args.hf or any(folder.glob("*.safetensors"))
    config = read_json(path) if args.hf else {}
    config = text_of(config) if args.text else config
    cfg = source_of(folder, text=args.text).cfg if has_weights else config_from_hf(config)
    if args.text or read_of(config) != config:
        say_unused(f"the text alone is read, a model of model_type {cfg.model_type!r}")
    said = cfg.model_dump(exclude_none=True, exclude_defaults=True)
    print(yaml.safe_dump({"model": said}, sort_keys=False), end="")
    return 0


def _merge(args: argparse.Namespace) -> int:
    from mjax.checkpoint.base.companion_files import read_side_files, with_tokenizer_of
    from mjax.interop.huggingface.exported_files import side_files
    from mjax.interop.merge import RECORD, merged_source, stored_dtype, write_merged
    from mjax.interop.sources import folder_with_weights, source_of

    require_files(args.base)
    require_files(args.adapter)
    args.base, args.adapter = map(folder_with_weights, (args.base, args.adapter))
    source = merged_source(args.base, args.adapter)
    source.check()
    dtype = args.dtype or stored_dtype(source_of(args.base))
    extras = read_side_files(args.base)
    if (args.base / "config.json").is_file():
        extras = side_files(source.cfg, args.base, dtype, source.unread())
    elif dtype == "float16":
        raise UserError("--dtype float16 is for bases in Hugging Face's format; take bfloat16")
    extras.pop(RECORD, None)
    extras = with_tokenizer_of(args.adapter, extras)
    write_merged(args.base, args.adapter, args.out, source, dtype, extras)
    print(f"{args.out}: {args.base} with the adapters in {args.adapter}, as {dtype}")
    return 0


def _unmerge(args: argparse.Namespace) -> int:
    from mjax.interop.merge import unmerge

    require_files(args.merged)
    base = unmerge(args.merged, args.out)
    print(f"{args.out}: the bits of {base}")
    return 0


def _extract(args: argparse.Namespace) -> int:
    from mjax.interop.merge import extract

    require_files(args.run)
    extract(args.run, args.out)
    print(f"{args.out}: the adapters of {args.run} for PEFT")
    return 0


def verify(ours: str | Path, hf: Path, dtype: str) -> int:
    """Compare the logits of the model in `ours`, its weights rounded to `dtype`, with those that
    transformers computes from `hf`; 0 if they agree to `BOUND` in fp32, else 1."""
    with or_user_error(
        "--verify needs transformers and torch: {reason}; install mjax[oracle]", ImportError
    ):
        import torch
        import transformers
    import jax
    import jax.numpy as jnp

    from mjax.interop.huggingface.families.engine import family_of
    from mjax.interop.pretrained import from_pretrained

    mine = from_pretrained(ours)
    params = jax.tree.map(lambda p: p.astype(dtype).astype(jnp.float32), mine.params)
    tokens = _random_inputs(mine.cfg)
    architecture = read_json(hf / "config.json").get("architectures", ["Model"])[0]
    if architecture.endswith("Model") and not mine.cfg.architecture.compares:  # of a base class
        architecture = family_of(mine.cfg).architecture
    model = getattr(transformers, architecture).from_pretrained(
        hf, dtype=torch.float32, attn_implementation="eager"
    )
    kind = mine.cfg.architecture
    ids = torch.tensor(tokens.astype(int) if kind.reads_tokens else np.moveaxis(tokens, -1, 1))
    target = {"decoder_input_ids": ids[:, ::2]} if kind.reads_target else {}
    images = _random_images(mine.cfg) if kind.compares else None
    if images is not None:
        target = {"pixel_values": torch.tensor(np.moveaxis(images, -1, 1))}
    with torch.no_grad():
        theirs = model.eval()(ids, **target)
    names = "logits", "prediction_logits", "logits_per_image"
    theirs = next(theirs[name] for name in names if name in theirs).numpy()

    def logits(params, tokens):
        model = mine.definition.bind(params)
        if images is not None:
            return model.pair_logits(model.image_embeddings(images), model.text_embeddings(tokens))
        if not kind.reads_tokens:
            return model.classify_images(tokens)
        if mine.cfg.num_labels:  # theirs are of the last token
            return model(tokens)[:, -1]
        if kind.predicts == "classes":
            return model.classify(tokens)
        return model(tokens, target=tokens[:, ::2] if target else None)

    got = np.asarray(jax.jit(logits)(params, jnp.asarray(tokens)))
    error = float(np.abs(got - theirs).max() / np.abs(theirs).max())
    verdict = "equal" if error <= BOUND else "DIFFERENT"
    print(f"verify: logits {verdict}, largest relative difference {error:.1e} (bound {BOUND:.0e})")
    return 0 if error <= BOUND else 1


def _random_inputs(cfg: ModelConfig) -> np.ndarray:
    """int32 tokens [2, S], or fp32 images [2, H, W, C] for a model that reads them."""
    rng = np.random.default_rng(0)
    if not cfg.architecture.reads_tokens:
        return _random_images(cfg)
    first = cfg.bert.position_offset  # RoBERTa's ids below it are no tokens of a text
    shape = 2, min(64, cfg.max_position_embeddings - first)
    return rng.integers(first, cfg.vocab_size, shape, np.int32)


def _random_images(cfg: ModelConfig) -> np.ndarray:
    """fp32 images [2, H, W, C]."""
    side = cfg.vision.image_size
    shape = 2, side, side, cfg.vision.num_channels
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


if __name__ == "__main__":
    run_cli(main)
