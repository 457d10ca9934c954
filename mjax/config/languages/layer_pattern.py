"""What a layer is: its residual branches, THE table of them, and `model.layer_pattern`.

A layer is a sequence of branches. Each reads the residual stream through a norm and adds to it. The
pattern names the layers of a model in order, and repeats from its start:

- A letter names a common layer (`LAYERS`): "(LLLLLG)*4,LL".
- Brackets hold the branches of a layer (`BRANCHES`), in order: "[LE][GE]" alternates windowed and
  full attention, each before experts. `|` stands between branches that read the same norm and are
  added at once: "[G|D]".
- The same in words, with commas between layers: "window+experts, full+experts".
- Behind "megatron:" stand the letters of Megatron-LM's `--hybrid-override-pattern`, a branch a
  layer: "megatron:*-*E".
- `@1` takes the sizes of a layer from the first entry of `model.layer_sizes`: "G@1*2,G".

Layers whose parameters have equal shapes share one stack, in the order of the model, whatever their
window or position encoding. So the place of a parameter in a checkpoint depends on neither the
period of the pattern nor a pipeline.
"""

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mjax.errors import UserError

# Streams besides those of modalities (`models/base/streams.py`).
ENCODER, DECODER = "encoder", "decoder"


@dataclass(frozen=True)
class Branch:
    """A residual branch of a layer.

    word: its name in patterns. module: the class that computes it (`models/base/branch.py`).
    name: of its parameters within a layer. shape: a word for the shapes of its parameters; layers
        whose branches have equal words share a stack.
    sizes: the keys of an entry of `model.layer_sizes` that it reads.
    matmuls: the names of its matmuls (`ParamSpec.matmul`).
    kept: the names of other tensors that are dear to compute again (`config/languages/remat.py`).
    windowed: whether it is attention in a sliding window.
    rotary: the key of the size of heads that RoPE turns; empty: it turns none.
    mask: the kind of the mask of attention (`kernels/base/attention_call.py`).
    normed: whether it reads the residual stream through a norm of its own.
    modality: the group of `model` with the sizes of a tower's attention, or of the tower whose
        output a projector reads.
    """

    word: str
    module: str
    name: str
    shape: str
    sizes: tuple[str, ...] = ()
    matmuls: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    windowed: bool = False
    rotary: str = ""
    mask: str = "causal"
    normed: bool = True
    modality: str = ""


_ATTENTION = {
    "module": "mjax.models.attention.self_attention:Attention",
    "name": "attention",
    "shape": "attention",
    "sizes": ("attention.num_attention_heads", "attention.num_key_value_heads"),
    "matmuls": ("q", "kv", "attn_proj"),
    "kept": ("attn_out", "attn_lse"),
}
_HEAD = "attention.head_dim"
_CROSS = {
    "name": "cross_attention",
    "sizes": _ATTENTION["sizes"],
    "matmuls": ("cross_q", "cross_kv", "cross_attn_proj"),
    "kept": _ATTENTION["kept"],
    "mask": "cross",
}
_PROJECTOR = {
    "name": "projector",
    "matmuls": ("projector_up", "projector_down"),
    "normed": False,
}

# THE table of branches. A new mixer is a module and a row here.
BRANCHES: dict[str, Branch] = {
    "G": Branch("full", **_ATTENTION, rotary=_HEAD),
    "L": Branch("window", **_ATTENTION, rotary=_HEAD, windowed=True),
    "N": Branch("nope", **_ATTENTION),
    "B": Branch("bidirectional", **_ATTENTION, rotary=_HEAD, mask="full"),
    "W": Branch(
        "bidirectional_window",
        **_ATTENTION,
        rotary=_HEAD,
        mask="full",
        windowed=True,
    ),
    "F": Branch(
        "bidirectional_unnormed",
        **(_ATTENTION | {"shape": "unnormed_attention"}),
        rotary=_HEAD,
        mask="full",
        normed=False,
    ),
    "U": Branch("text", **_ATTENTION, rotary=_HEAD, mask="full"),
    "V": Branch("vision", **(_ATTENTION | {"shape": "vision"}), mask="full", modality="vision"),
    "P": Branch(
        "projector",
        "mjax.models.towers.projector:Projector",
        shape="projector",
        modality="vision",
        **_PROJECTOR,
    ),
    "S": Branch("audio", **(_ATTENTION | {"shape": "audio"}), mask="full", modality="audio"),
    "Q": Branch(
        "audio_projector",
        "mjax.models.towers.projector:AudioProjector",
        shape="audio_projector",
        modality="audio",
        **_PROJECTOR,
    ),
    "A": Branch(
        "mla",
        "mjax.models.attention.latent:MLA",
        name="attention",
        shape="mla",
        sizes=("attention.num_attention_heads",),
        matmuls=("q", "q_a", "q_b", "kv_a", "kv_b", "attn_proj"),
        kept=("attn_out", "attn_lse"),
        rotary="mla.qk_rope_head_dim",
    ),
    "X": Branch("cross", "mjax.models.attention.cross:CrossAttention", shape="cross", **_CROSS),
    "R": Branch(
        "retrieval",
        "mjax.models.retrieval.chunked_attention:ChunkedCrossAttention",
        shape="retrieval",
        **_CROSS,
    ),
    "C": Branch(
        "chunk", "mjax.models.retrieval.chunked_attention:ChunkAttention", shape="chunk", **_CROSS
    ),
    "D": Branch(
        "mlp",
        "mjax.models.feedforward.mlp:MLP",
        name="mlp",
        shape="mlp",
        sizes=("intermediate_size",),
        matmuls=("up", "down"),
    ),
    "E": Branch(
        "experts",
        "mjax.models.moe.layer:MoE",
        name="mlp",
        shape="moe",
        sizes=("moe.moe_intermediate_size",),
        # The first two are those of the shared expert.
        matmuls=("up", "down", "expert_up", "expert_down", "latent_in", "latent_out"),
    ),
    "M": Branch(
        "mamba",
        "mjax.models.recurrent.mamba:Mamba",
        name="mamba",
        shape="mamba",
        matmuls=("ssm_in", "ssm_bc", "ssm_dt", "ssm_proj"),
        kept=("ssd_out", "ssd_states"),  # our kernels make the states again, and keep none
    ),
    "I": Branch(
        "linear",
        "mjax.models.feedforward.linear_map:LinearMap",
        name="linear",
        shape="linear",
        matmuls=("linear",),
    ),
    "J": Branch(
        "linear_mlp",
        "mjax.models.feedforward.linear_map:LinearMlp",
        name="linear_mlp",
        shape="linear_mlp",
        matmuls=("linear_mlp",),
    ),
    "T": Branch(
        "deltanet",
        "mjax.models.recurrent.deltanet:DeltaNet",
        name="deltanet",
        shape="deltanet",
        matmuls=("delta_in", "delta_ba", "delta_proj"),
        kept=("delta_out", "delta_states"),
    ),
}

# Common layers, by letter.
LAYERS = {"G": "GD", "L": "LD", "N": "ND", "B": "BD", "V": "VD", "S": "SD", "A": "AD", "E": "GE"}
LAYERS |= {"U": "UD", "M": "M", "T": "T", "W": "WD", "F": "FD"}

# Stacks whose names are older than the words for shapes.
_STACK_NAMES = {"attention_mlp": "dense", "attention_moe": "moe"}

_MEGATRON = "megatron:"
_LAYER = r"(?:[A-Z]|\[[A-Z|]+\])(?:@\d+)?"
_GROUP = re.compile(rf"\(((?:{_LAYER})+)\)\*(\d+)|({_LAYER})\*(\d+)|\(((?:{_LAYER})+)\)(?!\*)")
_WORDS = re.compile(r"[a-z][a-z0-9_]*(?:[+|][a-z][a-z0-9_]*)*")


@functools.cache
def expand(pattern: str, num_layers: int) -> tuple[str, ...]:
    """The kinds of all `num_layers` layers. Raises `UserError` for a malformed pattern.

    A kind is a letter of `LAYERS` or the branches of a layer in brackets, with its `@` if it has
    one.
    """
    if pattern.startswith(_MEGATRON):
        flat = _from_megatron(pattern)
    else:
        flat = _WORDS.sub(lambda match: _letters_of_words(pattern, match[0]), pattern)
    flat = re.sub(r"[\s,]", "", flat)
    while _GROUP.search(flat):
        flat = _GROUP.sub(lambda m: (m[1] or m[3] or m[5]) * int(m[2] or m[4] or 1), flat)
    kinds = [_canonical(kind) for kind in re.findall(_LAYER, flat)]
    rest = re.sub(_LAYER, "", flat)
    unknown = [kind for kind in kinds if not _is_kind(kind)]
    if rest or unknown or not kinds:
        found = rest[:1] or "".join(unknown[:1])
        raise _malformed(pattern, f"has no block called {found!r}" if found else "is empty")
    for kind in kinds:
        names = [BRANCHES[letter].name for letter in branches_of(kind)]
        if len(set(names)) < len(names):  # names of parameters and of matmuls would meet
            raise _malformed(pattern, f"has two branches of the same sort in {kind!r}")
    if len(kinds) > num_layers:
        raise UserError(
            f"model.layer_pattern={pattern!r} names {len(kinds)} blocks but "
            f"model.num_hidden_layers={num_layers}; make them agree"
        )
    repeats = -(-num_layers // len(kinds))
    return tuple((kinds * repeats)[:num_layers])


def _malformed(pattern: str, what: str) -> UserError:
    letters = "/".join(LAYERS)
    words = ", ".join(branch.word for branch in BRANCHES.values())
    return UserError(
        f"model.layer_pattern={pattern!r} {what}; use letters of {letters}, branches in brackets "
        f"({'/'.join(BRANCHES)}) or in words ({words}), groups and repeats as in '(LLLLLG)*4,LL' "
        "or 'window+experts, full+experts'"
    )


def _letters_of_words(pattern: str, words: str) -> str:
    """A layer in words -> in brackets."""
    letter_of = {branch.word: letter for letter, branch in BRANCHES.items()}
    letters = []
    for word in re.split(r"([+|])", words):
        if word not in letter_of and word not in "+|":
            raise _malformed(pattern, f"has no block called {word!r}")
        letters.append(letter_of.get(word, word))
    return f"[{''.join(letters).replace('+', '')}]"


def _from_megatron(pattern: str) -> str:
    """Megatron-LM's hybrid pattern, a branch a layer -> the same in brackets."""
    letters = {"M": "M", "*": "G", "-": "D", "E": "E"}
    found = pattern.removeprefix(_MEGATRON)
    unknown = [letter for letter in found if letter not in letters]
    if unknown:
        raise UserError(
            f"model.layer_pattern={pattern!r} has {unknown[0]!r}, which mjax does not build; of "
            f"Megatron-LM's letters it knows {' '.join(letters)}"
        )
    return "".join(f"[{letters[letter]}]" for letter in found)


def _canonical(kind: str) -> str:
    """A kind by its letter, where `LAYERS` has one for its branches."""
    layer, at, sizes = kind.partition("@")
    for letter, branches in LAYERS.items():
        if layer == f"[{branches}]":
            layer = letter
    return layer + at + sizes


def _is_kind(kind: str) -> bool:
    layer = kind.partition("@")[0]
    if not layer.startswith("["):
        return layer in LAYERS
    groups = layer[1:-1].split("|")
    return all(groups) and all(letter in BRANCHES for letter in "".join(groups))


@functools.cache
def branch_groups(kind: str) -> tuple[str, ...]:
    """The branches of a layer: groups of letters, one letter each but where some stand side by
    side."""
    layer = kind.partition("@")[0]
    letters = layer[1:-1] if layer.startswith("[") else LAYERS[layer]
    return tuple(group.replace("|", "") for group in re.findall(r"[A-Z](?:\|[A-Z])*", letters))


def branches_of(kind: str) -> str:
    """The letters of all branches of a layer, in order."""
    return "".join(branch_groups(kind))


def branches_of_model(kinds: Sequence[str]) -> set[str]:
    """The letters of the branches that layers of these kinds have."""
    return {letter for kind in set(kinds) for letter in branches_of(kind)}


def sees_ahead(kinds: Sequence[str]) -> bool:
    """Whether tokens attend to tokens behind them in some layer of these kinds."""
    return any(BRANCHES[letter].mask != "causal" for letter in branches_of_model(kinds))


def modality_of(kind: str) -> str:
    """The modality whose tower or projector a layer is of; empty: of none."""
    return "".join(BRANCHES[letter].modality for letter in branches_of(kind))


def of_tower(kind: str) -> bool:
    """Whether a layer has the sizes of a tower (`model.vision`, `model.audio`), not the model's."""
    return bool(modality_of(kind)) and sees_ahead([kind])


def stream_of(kind: str) -> str:
    """The stream that a layer works on, in a model with several (`models/base/streams.py`)."""
    if of_tower(kind):
        return modality_of(kind)
    return ENCODER if {"B", "C"} & set(branches_of(kind)) else DECODER


def stream_read_by(kind: str) -> str:
    """The stream that a layer reads beside its own."""
    return (modality_of(kind) or ENCODER) if of_decoder(kind) else DECODER


def of_decoder(kind: str) -> bool:
    """Whether a layer of a model with several streams is one of its decoder.

    The others see both ways, or read the decoder from the neighbors of its chunks.
    """
    return stream_of(kind) == DECODER


def has_heads(letter: str) -> bool:
    """Whether a branch is attention."""
    return "attn_out" in BRANCHES[letter].kept


def shortest(kinds: Sequence[str]) -> Sequence[str]:
    """The first of these kinds of layers, as few as repeat to all of them."""
    n = len(kinds)
    period = next(p for p in range(1, n + 1) if all(kinds[i] == kinds[i % p] for i in range(n)))
    return kinds[:period]


def sizes_of(kind: str) -> int:
    """The entry of `model.layer_sizes` that a layer takes its sizes from, from 1; 0: none."""
    return int(kind.partition("@")[2] or 0)


def stack_of(kind: str) -> str:
    """The stack that a layer's parameters lie in."""
    shapes = []
    for group in branch_groups(kind):
        words = [BRANCHES[letter].shape for letter in group]
        shapes.append("_beside_".join(words))
    name = "_".join(shapes)
    name = _STACK_NAMES.get(name, name)
    sizes = sizes_of(kind)
    return f"{name}_{sizes}" if sizes else name


def stacks_of(kinds: Sequence[str]) -> tuple[str, ...]:
    """The stacks that layers of these kinds lie in, sorted."""
    return tuple(sorted({stack_of(kind) for kind in kinds}))


def stack_index(kinds: Sequence[str]) -> tuple[int, ...]:
    """The row of each layer in the stack of its kind."""
    rows: dict[str, Iterator[int]] = defaultdict(itertools.count)  # of each stack, those to come
    return tuple(next(rows[stack_of(kind)]) for kind in kinds)
