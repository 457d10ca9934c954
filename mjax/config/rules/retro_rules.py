"""The rules about RETRO, which reads retrieved neighbors: a part of the table (`validate.py`)."""

from collections.abc import Iterator

from mjax.config.languages.layer_pattern import branches_of, branches_of_model, of_decoder
from mjax.config.rules.rule import rule, rules_of
from mjax.config.schema.run import Config

# The branches that layers of neighbors are made of.
_OF_NEIGHBORS = {"bidirectional", "chunk", "mlp"}


@rule("write it as in configs/quickstart_retro.yaml")
def neighbors_are_encoded_before_they_are_read(c: Config) -> Iterator[str]:
    kinds = c.model.layer_kinds
    if not c.model.has_role("retrieval"):
        return
    of_text = list(map(of_decoder, kinds))
    reading = ["retrieval" in branches_of(kind) for kind in kinds]
    of_neighbors = branches_of_model([kind for kind in kinds if not of_decoder(kind)])
    if "bidirectional" not in of_neighbors or True not in reading:
        yield "`model.layer_pattern`: RETRO has bidirectional and retrieval layers"
    elif of_neighbors - _OF_NEIGHBORS or c.model.has_role("cross_attention"):
        yield "`model.layer_pattern`: neighbors have bidirectional, chunk and mlp; cross is T5's"
    elif reading.index(True) < of_text.index(False):
        yield "`model.layer_pattern`: a layer with retrieval stands before all layers of neighbors"


@rule("set train.objective=next_token")
def retro_predicts_the_next_token(c: Config) -> Iterator[str]:
    if c.model.architecture.reads_neighbors and c.train.objective != "next_token":
        yield "`train.objective` knows no neighbors (retrieval in `model.layer_pattern`)"


@rule("change either")
def chunks_divide(c: Config) -> Iterator[str]:
    retro, parts = c.model.retro, c.mesh.tp if c.mesh.cp == 1 else 2 * c.mesh.cp * c.mesh.tp
    if not c.model.architecture.reads_neighbors:
        return
    if c.data.seq_length % retro.chunk_length:
        yield "`data.seq_length` is not divisible by `model.retro.chunk_length`"
    if retro.retrieved_length % parts:
        yield (
            "`model.retro.chunk_length` x `model.retro.num_retrieved_chunks` is not divisible by "
            "`mesh.tp`, and with `mesh.cp` by 2 x both"
        )


@rule("change either")
def chunks_trade_heads(c: Config) -> Iterator[str]:
    heads = c.model.attention.num_attention_heads // c.mesh.tp
    if c.model.architecture.reads_neighbors and heads % c.mesh.cp:
        yield (
            "`model.attention.num_attention_heads` over `mesh.tp` is not divisible by `mesh.cp`, "
            "over which chunks (retrieval in `model.layer_pattern`) trade heads for sequence"
        )


@rule("put the texts into one pair of files (data.paths), or set the key back to its default")
def neighbors_are_of_one_corpus(c: Config) -> Iterator[str]:
    if not c.model.architecture.reads_neighbors:
        return
    if len(c.data.paths) > 1 or c.data.weights is not None:
        yield "`data.paths`: neighbors are looked up in one corpus, for the samples of one"
    if len(c.data.valid_paths) > 1:
        yield "`data.valid_paths`: neighbors are looked up for the samples of one corpus"
    if c.data.fim_rate:
        yield "`data.fim_rate` rearranges the text whose neighbors were looked up"


RETRO_RULES = rules_of(globals())
