"""The rules about `preference` and `reward`: a part of the table of rules (`validate.py`)."""

from collections.abc import Iterator

from mjax.config.languages.layer_pattern import BRANCHES
from mjax.config.rules.reinforce_rules import draws_answers
from mjax.config.rules.rule import rule, rules_of
from mjax.config.schema.run import Config

ANSWER_OBJECTIVES = "preference", "reward"


@rule("give one weight a loss, or null for weights of 1")
def losses_have_weights(c: Config) -> Iterator[str]:
    preference = c.preference
    names, weights = preference.loss_type, preference.loss_weights
    names = [names] if isinstance(names, str) else names
    if not names or len(set(names)) < len(names):
        yield "`preference.loss_type` needs at least one loss, each named once"
    if weights is not None and len(weights) != len(names):
        yield "`preference.loss_weights` does not have one entry for each of `preference.loss_type`"


@rule("take pair losses alone, or kto, or apo_zero_unpaired")
def losses_go_together(c: Config) -> Iterator[str]:
    if c.train.objective != "preference":
        return
    if c.preference.is_unpaired and len(c.preference.losses) > 1:
        yield "`preference.loss_type` mixes losses of single answers with others"
    if set(c.preference.losses) == {"sft"}:
        yield "`preference.loss_type` alone compares nothing (mjax sft trains on answers)"
    if {"orpo", "sft"} <= set(c.preference.losses):
        yield "`preference.loss_type`: orpo has a term of its own for chosen answers"


@rule("set preference.label_smoothing above 0, to 1e-3 say")
def exo_smooths(c: Config) -> Iterator[str]:
    if "exo_pair" in c.preference.losses and c.preference.label_smoothing == 0:
        yield "exo_pair compares with (1 - `preference.label_smoothing`, label_smoothing)"


@rule("leave preference.reference_free, or the other key, at its default")
def reference_is_used(c: Config) -> Iterator[str]:
    preference = c.preference
    if c.train.objective != "preference" or preference.needs_reference:
        return
    for key in ("reference", "precompute_ref_log_probs"):
        if getattr(preference, key):
            yield f"`preference.{key}`, but nothing reads a reference"
    if preference.reference_free and preference.is_unpaired:
        yield "`preference.reference_free` leaves kto nothing to compare with"


@rule("set train.loss_divisor=tokens; preference.loss_divisor has pairs, sequences and tokens")
def answers_have_a_divisor(c: Config) -> Iterator[str]:
    if c.train.objective in ANSWER_OBJECTIVES and c.train.loss_divisor != "tokens":
        yield "`train.loss_divisor` divides losses of tokens"


@rule("set data.conversations.path to a file of them, data.mock=true for speed tests")
def answers_are_conversations(c: Config) -> Iterator[str]:
    has_data = c.data.conversations.path is not None or c.data.mock
    if c.train.objective in ANSWER_OBJECTIVES and not has_data:
        yield "`train.objective` reads records of answers"


@rule("set data.document_mask=true")
def answers_are_documents(c: Config) -> Iterator[str]:
    has_answers = c.train.objective in ANSWER_OBJECTIVES or draws_answers(c)
    if has_answers and not c.data.document_mask:
        yield "answers of a row would see each other: `data.document_mask`"


@rule("set data.shared_prefixes=false")
def prefixes_can_be_shared(c: Config) -> Iterator[str]:
    if not c.data.shared_prefixes:
        return
    heads = (BRANCHES[word] for word in c.model.branches if BRANCHES[word].has_heads)
    if c.mesh.cp > 1:
        yield "`mesh.cp` cuts rows, and answers need their prompt whole (`data.shared_prefixes`)"
    if c.model.architecture.name != "decoder" or {b.mask for b in heads} - {"causal"}:
        yield "`data.shared_prefixes` is built for decoders with causal attention"
    is_single = c.preference.is_unpaired and "kto" not in c.preference.losses
    if c.train.objective == "preference" and is_single or c.reward.loss_type == "steps":
        yield "`data.shared_prefixes`, but each prompt has one answer"


@rule("set model.num_labels=1 for rewards and values, and to 0 with any other objective")
def rewards_have_a_head(c: Config) -> Iterator[str]:
    wanted = 1 if c.train.objective in ("reward", "value") else 0
    if c.model.num_labels != wanted and ":" not in c.train.objective:
        yield "`train.objective` and `model.num_labels` do not go together"


@rule("set model.num_labels=0")
def scores_are_of_decoders(c: Config) -> Iterator[str]:
    if c.model.num_labels and c.model.architecture.name != "decoder":
        yield f"`model.num_labels` is not built for the architecture {c.model.architecture.name}"


PREFERENCE_RULES = rules_of(globals())
