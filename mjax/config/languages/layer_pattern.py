"""The residual branches of a layer, THE table of them, and `model.layer_pattern`.

A layer is a sequence of branches. Each reads the residual stream through a norm and adds to it. The
pattern names the layers of a model in order, and repeats from its start:

- Words name the branches of a layer (`BRANCHES`), in order: "window+experts, full+experts"
  alternates windowed and full attention, each before experts. `|` stands between branches that read
  the same norm and are added at once: "full|mlp".
- Parentheses group layers, and `*` repeats a layer or a group: "(window+mlp*5, full+mlp)*4".
- `@1` takes the sizes of a layer from the first entry of `model.layer_sizes`:
  "full+mlp@1*2, full+mlp".
- A letter names a common layer (`LAYERS`): "(LLLLLG)*4,LL". Brackets hold the letters of branches:
  "[LE][GE]", "[G|D]".
- After "megatron:" follow the letters of Megatron-LM's `--hybrid-override-pattern`, a branch a
  layer: "megatron:*-*E".

The kind of a layer is its words with its `@` if it has one, as in "window+experts@1", however the
pattern says it. Layers whose parameters have equal shapes share one stack, in the order of the
model, whatever their window or position encoding. So the place of a parameter in a checkpoint
depends on neither the period of the pattern nor a pipeline.
"""

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mjax.errors import UserError

# Streams besides those of modalities (`models/base/streams.py`).
ENCODER, DECODER = "encoder", "decoder"
DEEPSTACK = "deepstack"  # outputs of some layers of a tower of images, side by side


@dataclass(frozen=True)
class Branch:
    """A residual branch of a layer.

    module: the class that computes it (`models/base/branch.py`).
    name: of its parameters within a layer. shape: a word for the shapes of its parameters; layers
        whose branches have equal words share a stack.
    role: what it is for: attention, cross_attention, retrieval, feedforward, experts, recurrent,
        linear or projector.
    group: the group of `model` with the keys that are its own; empty: it has no such group.
    letter: its name in patterns of letters; empty: it has none.
    sizes: the keys of an entry of `model.layer_sizes` that it reads.
    matmuls: the names of its matmuls (`ParamSpec.matmul`).
    kept: the names of other tensors that are dear to compute again (`config/languages/remat.py`).
    windowed: whether it is attention in a sliding window.
    rotary: the key of the size of heads that RoPE turns; empty: it turns none.
    mask: the kind of the mask of attention (`kernels/base/attention_call.py`).
    normed: whether it reads the residual stream through a norm of its own.
    stream: the stream that its layer works on in a model with several; a tower's is its modality.
    modality: the group of `model` with the sizes of a tower's attention, or of the tower whose
        output a projector reads.
    within: the field of `Tokens` whose equal values attend to each other.
    reads: the stream that its layer reads; empty: that of its modality, or the encoder's.
    """

    module: str
    name: str
    shape: str
    role: str
    group: str = ""
    letter: str = ""
    sizes: tuple[str, ...] = ()
    matmuls: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    windowed: bool = False
    rotary: str = ""
    mask: str = "causal"
    normed: bool = True
    stream: str = DECODER
    modality: str = ""
    within: str = "segments"
    reads: str = ""

    @property
    def has_heads(self) -> bool:
        """Whether it is attention, to its own stream or to another."""
        return self.role in ("attention", "cross_attention", "retrieval")


_ATTENTION: dict[str, Any] = {
    "module": "mjax.models.attention.self_attention:Attention",
    "name": "attention",
    "shape": "attention",
    "role": "attention",
    "group": "attention",
    "sizes": ("attention.num_attention_heads", "attention.num_key_value_heads"),
    "matmuls": ("q", "kv", "attn_proj"),
    "kept": ("attn_out", "attn_lse"),
}
_ROTATED = _ATTENTION | {"rotary": "attention.head_dim"}
_BOTH_WAYS = _ROTATED | {"mask": "full"}
_TOWER = _ATTENTION | {"mask": "full"}
_OF_VISION = {"shape": "vision", "group": "vision", "modality": "vision"}
_PATCHES = _TOWER | _OF_VISION | {"rotary": "vision.head_dim"}
_PATCHES |= {"module": "mjax.models.towers.packed_vision:PatchAttention"}
_CROSS: dict[str, Any] = {
    "name": "cross_attention",
    "sizes": _ATTENTION["sizes"],
    "matmuls": ("cross_q", "cross_kv", "cross_attn_proj"),
    "kept": _ATTENTION["kept"],
    "mask": "cross",
}
_RETRIEVAL = _CROSS | {"role": "retrieval", "group": "retro"}
_PROJECTOR: dict[str, Any] = {
    "name": "projector",
    "role": "projector",
    "matmuls": ("projector_up", "projector_down"),
    "normed": False,
}

_MERGER = _PROJECTOR | _OF_VISION | {"shape": "patch_merger"}

PROJECTORS = frozenset({"projector", "normed_projector"})  # of images
# THE table of branches, by their words. A new mixer is a module and a row here.
BRANCHES: dict[str, Branch] = {
    "full": Branch(**_ROTATED, letter="G"),
    "window": Branch(**_ROTATED, letter="L", windowed=True),
    "nope": Branch(**_ATTENTION, letter="N"),
    "nope_window": Branch(**_ATTENTION, windowed=True),
    "bidirectional": Branch(**_BOTH_WAYS, letter="B", stream=ENCODER),
    "bidirectional_window": Branch(**_BOTH_WAYS, letter="W", windowed=True),
    "bidirectional_unnormed": Branch(
        **(_BOTH_WAYS | {"shape": "unnormed_attention"}), letter="F", normed=False
    ),
    "text": Branch(**_BOTH_WAYS, letter="U"),
    "vision": Branch(
        **(_TOWER | {"shape": "vision", "group": "vision"}), letter="V", modality="vision"
    ),
    "projector": Branch(
        "mjax.models.towers.projector:Projector",
        **_PROJECTOR,
        shape="projector",
        group="vision",
        letter="P",
        modality="vision",
    ),
    "normed_projector": Branch(
        "mjax.models.towers.projector:NormedProjector",
        **_PROJECTOR,
        shape="normed_projector",
        group="vision",
        modality="vision",
    ),
    "vision_2d": Branch(**_PATCHES),
    "vision_window": Branch(**_PATCHES, within="windows"),
    "patch_merger": Branch("mjax.models.towers.packed_vision:PatchMerger", **_MERGER),
    "deep_merger": Branch(
        "mjax.models.towers.packed_vision:DeepMerger",
        **(_MERGER | {"shape": "deep_merger", "reads": DEEPSTACK}),
    ),
    "audio": Branch(
        **(_TOWER | {"shape": "audio", "group": "audio"}), letter="S", modality="audio"
    ),
    "audio_projector": Branch(
        "mjax.models.towers.projector:AudioProjector",
        **_PROJECTOR,
        shape="audio_projector",
        group="audio",
        letter="Q",
        modality="audio",
    ),
    "mla": Branch(
        "mjax.models.attention.latent:MLA",
        name="attention",
        shape="mla",
        role="attention",
        group="mla",
        letter="A",
        sizes=("attention.num_attention_heads",),
        matmuls=("q", "q_a", "q_b", "kv_a", "kv_b", "attn_proj"),
        kept=("attn_out", "attn_lse"),
        rotary="mla.qk_rope_head_dim",
    ),
    "cross": Branch(
        "mjax.models.attention.cross:CrossAttention",
        **_CROSS,
        shape="cross",
        role="cross_attention",
        group="attention",
        letter="X",
    ),
    "retrieval": Branch(
        "mjax.models.retrieval.chunked_attention:ChunkedCrossAttention",
        **_RETRIEVAL,
        shape="retrieval",
        letter="R",
    ),
    "chunk": Branch(
        "mjax.models.retrieval.chunked_attention:ChunkAttention",
        **_RETRIEVAL,
        shape="chunk",
        letter="C",
        stream=ENCODER,
    ),
    "mlp": Branch(
        "mjax.models.feedforward.mlp:MLP",
        name="mlp",
        shape="mlp",
        role="feedforward",
        letter="D",
        sizes=("intermediate_size",),
        matmuls=("up", "down"),
    ),
    "experts": Branch(
        "mjax.models.moe.layer:MoE",
        name="mlp",
        shape="moe",
        role="experts",
        group="moe",
        letter="E",
        sizes=("moe.moe_intermediate_size",),
        # The first two are those of the shared expert.
        matmuls=("up", "down", "expert_up", "expert_down", "latent_in", "latent_out"),
    ),
    "mamba": Branch(
        "mjax.models.recurrent.mamba:Mamba",
        name="mamba",
        shape="mamba",
        role="recurrent",
        group="mamba",
        letter="M",
        matmuls=("ssm_in", "ssm_bc", "ssm_dt", "ssm_proj"),
        kept=("ssd_out", "ssd_states"),  # our kernels make the states again, and keep none
    ),
    "linear": Branch(
        "mjax.models.feedforward.linear_map:LinearMap",
        name="linear",
        shape="linear",
        role="linear",
        letter="I",
        matmuls=("linear",),
    ),
    "linear_mlp": Branch(
        "mjax.models.feedforward.linear_map:LinearMlp",
        name="linear_mlp",
        shape="linear_mlp",
        role="linear",
        letter="J",
        matmuls=("linear_mlp",),
    ),
    "deltanet": Branch(
        "mjax.models.recurrent.deltanet:DeltaNet",
        name="deltanet",
        shape="deltanet",
        role="recurrent",
        group="deltanet",
        letter="T",
        matmuls=("delta_in", "delta_ba", "delta_proj"),
        kept=("delta_out", "delta_states"),
    ),
}

# Common layers, by letter.
LAYERS = {
    "G": "full+mlp",
    "L": "window+mlp",
    "N": "nope+mlp",
    "B": "bidirectional+mlp",
    "V": "vision+mlp",
    "S": "audio+mlp",
    "A": "mla+mlp",
    "E": "full+experts",
    "U": "text+mlp",
    "M": "mamba",
    "T": "deltanet",
    "W": "bidirectional_window+mlp",
    "F": "bidirectional_unnormed+mlp",
}

# Stacks whose names are older than the words for shapes.
_STACK_NAMES = {"attention_mlp": "dense", "attention_moe": "moe"}

# Megatron-LM's letters, each of a layer with one branch.
_MEGATRON = "megatron:"
_MEGATRON_LAYERS = {"M": "mamba", "*": "full", "-": "mlp", "E": "experts"}

_WORDS = r"[a-z][a-z0-9_]*(?:[+|][a-z][a-z0-9_]*)*"
_TOKEN = re.compile(rf"(?:[A-Z]|\[[A-Z|]+\]|{_WORDS})(?:@\d+)?|\*\d+|\S")


@functools.cache
def expand(pattern: str, num_layers: int) -> tuple[str, ...]:
    """The kinds of all `num_layers` layers. Raises `UserError` for a malformed pattern."""
    if pattern.startswith(_MEGATRON):
        kinds = _from_megatron(pattern)
    else:
        kinds = _written_out(pattern)
    if not kinds:
        raise _malformed(pattern, "is empty")
    for kind in kinds:
        names = [BRANCHES[word].name for word in branches_of(kind)]
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
    letters = "/".join(branch.letter for branch in BRANCHES.values() if branch.letter)
    return UserError(
        f"model.layer_pattern={pattern!r} {what}; use branches in words ({', '.join(BRANCHES)}) "
        f"as in 'window+experts, full+experts', layers by letter ({'/'.join(LAYERS)}) as in "
        f"'(LLLLLG)*4,LL', or branches by letter in brackets ({letters})"
    )


def _written_out(pattern: str) -> list[str]:
    """The kinds of the layers that a pattern names, with its groups and repeats written out."""
    groups: list[list[str]] = [[]]  # the whole, and those that are open
    last: list[str] = []  # the layers that a repeat would repeat
    for token in _TOKEN.findall(pattern):
        if token == ",":
            continue
        if token == "(":
            groups.append([])
        elif token == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif token.startswith("*") and token[1:] and last:
            del groups[-1][-len(last) :]
            groups[-1] += last * int(token[1:])
            last = []
        else:
            last = [_kind_of_token(pattern, token)]
            groups[-1] += last
    if len(groups) > 1:
        raise _malformed(pattern, "has no ')' for a '('")
    return groups[0]


def _kind_of_token(pattern: str, token: str) -> str:
    """The kind that one layer of a pattern, in words or letters, has."""
    layer, at, sizes = token.partition("@")
    words = LAYERS.get(layer, layer)
    if layer.startswith("["):
        word_of = {branch.letter: word for word, branch in BRANCHES.items()}
        spaced = re.sub(r"(?<=[A-Z])(?=[A-Z])", "+", layer[1:-1])
        words = re.sub("[A-Z]", lambda letter: word_of.get(letter[0], letter[0]), spaced)
    for word in re.split("[+|]", words):
        if word not in BRANCHES:
            raise _malformed(pattern, f"has no block called {word or token!r}")
    return words + at + sizes


def _from_megatron(pattern: str) -> list[str]:
    """The kinds of the layers of Megatron-LM's hybrid pattern, a branch a layer."""
    letters = pattern.removeprefix(_MEGATRON)
    unknown = [letter for letter in letters if letter not in _MEGATRON_LAYERS]
    if unknown:
        raise UserError(
            f"model.layer_pattern={pattern!r} has {unknown[0]!r}, which mjax does not build; of "
            f"Megatron-LM's letters it knows {' '.join(_MEGATRON_LAYERS)}"
        )
    return [_MEGATRON_LAYERS[letter] for letter in letters]


@functools.cache
def branch_groups(kind: str) -> tuple[tuple[str, ...], ...]:
    """The branches of a layer in order: groups of words, one each but where some stand side by
    side."""
    layer = kind.partition("@")[0]
    return tuple(tuple(group.split("|")) for group in layer.split("+"))


def branches_of(kind: str) -> tuple[str, ...]:
    """The words of all branches of a layer, in order."""
    return tuple(itertools.chain(*branch_groups(kind)))


def branches_of_model(kinds: Iterable[str]) -> set[str]:
    """The words of the branches that layers of these kinds have."""
    return {word for kind in set(kinds) for word in branches_of(kind)}


def roles_of(kind: str) -> set[str]:
    """The roles of the branches of a layer."""
    return {BRANCHES[word].role for word in branches_of(kind)}


def sees_ahead(kinds: Sequence[str]) -> bool:
    """Whether tokens attend to later tokens in some layer of these kinds."""
    return any(BRANCHES[word].mask != "causal" for word in branches_of_model(kinds))


def modality_of(kind: str) -> str:
    """The modality whose tower or projector a layer is of; empty: of none."""
    return "".join(BRANCHES[word].modality for word in branches_of(kind))


def modalities_of(kinds: Iterable[str]) -> tuple[str, ...]:
    """The modalities whose towers or projectors are among layers of these kinds, sorted."""
    found = {BRANCHES[word].modality for word in branches_of_model(kinds)}
    return tuple(sorted(found - {""}))


def of_tower(kind: str) -> bool:
    """Whether a layer has the sizes of a tower (`model.vision`, `model.audio`), not the model's."""
    return bool(modality_of(kind)) and sees_ahead([kind])


def stream_of(kind: str) -> str:
    """The stream that a layer works on, in a model with several (`models/base/streams.py`)."""
    if of_tower(kind):
        return modality_of(kind)
    streams = {BRANCHES[word].stream for word in branches_of(kind)}
    return ENCODER if ENCODER in streams else DECODER


def stream_read_by(kind: str) -> str:
    """The stream that a layer reads beside its own."""
    named = "".join(BRANCHES[word].reads for word in branches_of(kind))
    if named:
        return named
    return (modality_of(kind) or ENCODER) if of_decoder(kind) else DECODER


def of_decoder(kind: str) -> bool:
    """Whether a layer of a model with several streams is one of its decoder.

    The others see both ways, or read the decoder from the neighbors of its chunks.
    """
    return stream_of(kind) == DECODER


def shortest(kinds: Sequence[str]) -> Sequence[str]:
    """The first of these kinds of layers, as few as repeat to all of them."""
    n = len(kinds)
    period = next(p for p in range(1, n + 1) if all(kinds[i] == kinds[i % p] for i in range(n)))
    return kinds[:period]


def pattern_of(kinds: Sequence[str]) -> str:
    """A pattern that names these kinds of layers, as few as repeat to all of them."""
    runs = []
    for kind, run in itertools.groupby(shortest(kinds)):
        count = len(list(run))
        runs.append(f"{kind}*{count}" if count > 1 else kind)
    return ", ".join(runs)


def sizes_of(kind: str) -> int:
    """The entry of `model.layer_sizes` that a layer takes its sizes from, from 1; 0: none."""
    return int(kind.partition("@")[2] or 0)


def stack_of(kind: str) -> str:
    """The stack that a layer's parameters lie in."""
    shapes = []
    for group in branch_groups(kind):
        shapes.append("_beside_".join(BRANCHES[word].shape for word in group))
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
