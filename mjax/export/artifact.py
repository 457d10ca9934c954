"""Run an exported model with jax (and flatbuffers) alone: greedy continuation of token ids.

    python run.py --ids 1,2,3 --ids 4,5 --max-new-tokens 32      # a JSON list of ids a row

`mjax.export.__main__` copies this file into every artifact as run.py, so it imports nothing of
mjax. It is also the example of the calling convention for readers in other languages: a program
takes (weights, cache, ids [B, S], real [B, S]) and returns (logits [B, V] of each row's last
token, cache). Prompts are padded on the left to whole blocks of the prefill program; `real` is 0
for padding.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np

FORMAT, FORMAT_VERSION = "mjax-stablehlo", 1
MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
ARTIFACT_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
PLATFORM_OF_DEVICE = {"gpu": "cuda"}  # jax's name of a device -> that of what is compiled for it


class ArtifactError(ValueError):
    """An artifact or a request that is wrong, in one line."""


class Artifact:
    """An artifact whose weights are on the default device; programs are compiled when used.

    Raises `ArtifactError` for an unknown format, a platform it was not made for, damaged files.
    """

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self.manifest = read_manifest(self._folder)
        self.weights = read_artifact_weights(self._folder, self.manifest["weights"])
        self._programs: dict[str, Callable] = {}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        eos: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """The likeliest continuation of each prompt; an id of `eos` (default: the model's own) is
        the last of its row."""
        eos = self.manifest["eos_token_ids"] if eos is None else eos
        for row, ids in enumerate(prompts):
            if not len(ids) or min(ids) < 0 or max(ids) >= self.manifest["vocab_size"]:
                limit = self.manifest["vocab_size"]
                raise ArtifactError(f"prompt {row}: needs one or more ids, each in [0, {limit})")
        if not prompts or max_new_tokens < 1:
            raise ArtifactError("give one or more prompts and one or more new tokens")
        most = max(bucket["batch"] for bucket in self.manifest["buckets"])
        groups = [prompts[at : at + most] for at in range(0, len(prompts), most)]
        return [row for group in groups for row in self._group(group, max_new_tokens, eos)]

    def _group(self, prompts, max_new_tokens: int, eos: Sequence[int]) -> list[list[int]]:
        bucket = self._bucket(len(prompts), max(map(len, prompts)), max_new_tokens)
        block, rows = bucket["prefill"]["tokens"], bucket["batch"]
        padded = -(-max(map(len, prompts)) // block) * block
        ids, real = np.zeros((2, rows, padded), np.int32)
        for row in range(rows):  # rows without a prompt repeat the last one
            prompt = prompts[min(row, len(prompts) - 1)]
            ids[row, padded - len(prompt) :] = prompt
            real[row, padded - len(prompt) :] = 1
        prefill, decode = (self._program(bucket[kind]) for kind in ("prefill", "decode"))
        cache = self.empty_cache(rows, bucket["length"])
        for at in range(0, padded, block):
            cut = slice(at, at + block)
            logits, cache = prefill(self.weights, cache, ids[:, cut], real[:, cut])
        out: list[list[int]] = [[] for _ in prompts]
        left, one = set(range(len(prompts))), np.ones((rows, 1), np.int32)
        while True:
            token = jnp.argmax(logits, -1).astype(jnp.int32)
            for row, made in enumerate(np.asarray(token)[: len(prompts)].tolist()):
                if row in left:
                    out[row].append(made)
                    if made in eos or len(out[row]) == max_new_tokens:
                        left.discard(row)
            if not left:
                return out
            logits, cache = decode(self.weights, cache, token[:, None], one)

    def empty_cache(self, batch: int, length: int) -> dict[str, jax.Array]:
        """Room for `length` tokens in each row."""
        sizes = {"B": batch, "T": length}
        return {
            name: jnp.zeros([sizes.get(n, n) for n in entry["shape"]], entry["dtype"])
            for name, entry in self.manifest["cache"].items()
        }

    def _bucket(self, rows: int, longest: int, new: int) -> dict:
        """The smallest bucket that holds the padded prompts and all but the last new token."""
        for bucket in self.manifest["buckets"]:
            block = bucket["prefill"]["tokens"]
            need = -(-longest // block) * block + new - 1
            if rows <= bucket["batch"] and need <= bucket["length"]:
                return bucket
        lengths = sorted({bucket["length"] for bucket in self.manifest["buckets"]})
        raise ArtifactError(
            f"a prompt of {longest} ids (padded to blocks of {block}) and {new} new ones do not "
            f"fit a cache of {lengths[-1]}; shorten them, or export with a larger --length"
        )

    def _program(self, entry: dict) -> Callable:
        """The compiled program of a file; it takes over the cache that is handed in."""
        name = entry["file"]
        if name not in self._programs:
            data = (self._folder / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != entry["sha256"]:
                raise ArtifactError(f"{self._folder / name}: damaged; copy the artifact again")
            try:
                exported = jax.export.deserialize(bytearray(data))
            except ImportError:
                raise ArtifactError("jax.export needs flatbuffers: pip install it") from None
            self._programs[name] = jax.jit(exported.call, donate_argnums=1)
        return self._programs[name]


def read_manifest(folder: Path) -> dict:
    """manifest.json, once it is clear that this file and this machine can run what it describes."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ArtifactError(f"{path}: cannot be read ({e}); give an artifact's folder") from None
    found = manifest.get("format"), manifest.get("format_version")
    if found != (FORMAT, FORMAT_VERSION):
        raise ArtifactError(
            f"{path}: format {found[0]!r} version {found[1]!r}, but this reader knows {FORMAT!r} "
            f"version {FORMAT_VERSION}; use the run.py that lies beside it"
        )
    platform = jax.devices()[0].platform
    platform = PLATFORM_OF_DEVICE.get(platform, platform)
    if platform not in manifest["platforms"]:
        raise ArtifactError(
            f"{path}: made for {', '.join(manifest['platforms'])}, but this machine has "
            f"{platform}; export it again with --platforms {platform}"
        )
    version = manifest["calling_convention_version"]
    oldest = jax.export.minimum_supported_calling_convention_version
    newest = jax.export.maximum_supported_calling_convention_version
    if not oldest <= version <= newest:
        raise ArtifactError(
            f"{path}: calling convention {version} of jax.export, but jax {jax.__version__} runs "
            f"{oldest} to {newest}; it was made with jax {manifest['jax']}"
        )
    return manifest


def read_artifact_weights(folder: Path, wanted: dict[str, dict]) -> dict[str, jax.Array]:
    """Name -> array on the default device, mapped from the safetensors file one by one."""
    path = folder / WEIGHTS
    try:
        raw = np.memmap(path, np.uint8, "r")
        start = 8 + int.from_bytes(bytes(raw[:8]), "little")
        header = json.loads(bytes(raw[8:start]))
        out = {}
        for name, entry in wanted.items():
            first, last = (start + at for at in header[name]["data_offsets"])
            array = raw[first:last].view(ARTIFACT_DTYPES[header[name]["dtype"]])
            out[name] = jax.device_put(array.reshape(entry["shape"]).astype(entry["dtype"]))
        return out
    except (OSError, ValueError, KeyError, RecursionError) as e:
        raise ArtifactError(f"{path}: damaged ({e!r}); copy the artifact again") from None


def main() -> int:
    parser = argparse.ArgumentParser(description="Continue lists of token ids, greedily.")
    ids = "comma-separated ids of a prompt; repeat for several"
    parser.add_argument("--ids", action="append", required=True, help=ids)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--dir", type=Path, default=Path(__file__).parent, help="the artifact")
    args = parser.parse_args()
    try:
        prompts = [[int(i) for i in row.split(",")] for row in args.ids]
        for row in Artifact(args.dir.expanduser()).generate(prompts, args.max_new_tokens):
            print(json.dumps(row))
    except ValueError as e:
        print(f"{Path(sys.argv[0]).name}: error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
