"""The caches of all layers of a model that is served: which kind each has, and their sizes.

A branch says what it keeps as training's caches do (`models/attention/caches.py`). Keys, values and
latents lie in pages; states, sources and keys under relative biases in slots.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mjax.config.languages.layer_pattern import BRANCHES, branches_of, of_decoder
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.infer.caches.paged import PagedExperts, PagedKeysValues, PagedLatents
from mjax.infer.caches.slots import SlotKeysValues, SlotSources, SlotStates
from mjax.models.attention.caches import KeysValues, Latents
from mjax.models.attention.cross import SourceKeysValues
from mjax.models.base.branch import branch_class
from mjax.models.recurrent.recurrent_mixer import RecurrentCache
from mjax.models.runtime.run import Caches


class PoolSizes(NamedTuple):
    """Sizes of the caches of one lane.

    pages: of the pool, the null page among them. rows: that are served at a time.
    width: pages of the longest row.
    eight_bits: whether keys and values are cached in e4m3.
    drafts: guessed tokens of a row that a step of decoding may verify.
    snapshots: further slots of states, which prompts of an equal beginning go on from.
    depths: of multi-token prediction that guess tokens; they have caches after those of layers.
    keeps_experts: whether caches say which experts tokens went to.
    """

    pages: int
    rows: int
    width: int
    eight_bits: bool = False
    drafts: int = 0
    snapshots: int = 0
    depths: int = 0
    keeps_experts: bool = False


def paged_specs(
    cfg: ModelConfig, sizes: PoolSizes, page: int, tp: int, kinds: Sequence[str]
) -> Caches:
    """The caches of layers of `kinds` as trees of `CacheSpec`, whose first axis is pages or slots.

    page: tokens of a page. Raises `UserError` for a branch whose cache does not lie in pages.
    """
    layers: Caches = []
    for kind in (*kinds, *cfg.prediction_kinds[: sizes.depths]):
        if cfg.architecture.has_streams and not of_decoder(kind):
            layers.append(None)
            continue
        layer = {}
        for word in branches_of(kind):
            of_layer, module = cfg.of_layer(kind), branch_class(word)
            found = module.cache(of_layer, sizes.pages, page, tp)
            by_slot = of_layer, sizes.rows + 1, sizes.width * page, tp
            match found:
                case SourceKeysValues():
                    found = SlotSources(*module.cache(*by_slot))
                case KeysValues() if cfg.position_embedding == "relative":
                    found = SlotKeysValues(*module.cache(*by_slot))
                case KeysValues():
                    found = PagedKeysValues(*found)
                    found = found.in_8_bits() if sizes.eight_bits else found
                case Latents():
                    found = PagedLatents(*found)
                case RecurrentCache():
                    slots = sizes.rows + 1 + sizes.snapshots
                    found = SlotStates(*module.cache(of_layer, slots, page, tp))
                case None if word == "experts" and sizes.keeps_experts:
                    count = of_layer.moe.num_experts_per_tok
                    found = PagedExperts.spec(sizes.pages, page, count)
                case None:
                    pass
                case _:
                    raise UserError(
                        f"model.layer_pattern={cfg.layer_pattern}: the engine does not serve "
                        f"layers with {module.__name__}; run the model on whole texts"
                    )
            layer[BRANCHES[word].name] = found
        layers.append(layer)
    return layers
