"""The rules about `reinforce`: a part of the table of rules (`validate.py`)."""

from collections.abc import Iterator

from mjax.config.rules.rule import rule, rules_of
from mjax.config.schema.keys import value_of
from mjax.config.schema.run import Config

_SAMPLING = {"temperature", "top_k", "top_p", "min_p"}
_LIMITS = {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0}  # with the values that limit nothing
_COMPARED = "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo"


def _is_policy(c: Config) -> bool:
    return c.train.objective in ("policy", "value")


@rule("take a decoder of text alone, with model.num_nextn_predict_layers=0")
def policies_are_decoders(c: Config) -> Iterator[str]:
    name = c.model.architecture.name
    if _is_policy(c) and name != "decoder":
        yield f"`train.objective` is not built for the architecture {name}"


@rule("leave it out; mjax reinforce draws prompts from reinforce.environment")
def policies_read_no_data(c: Config) -> Iterator[str]:
    for key in ("data.paths", "data.text") if _is_policy(c) else ():
        if value_of(c, key):
            yield f"`train.objective` does not read `{key}`"


@rule("take reinforce.group_size of 2 or more, or reinforce_pp or ppo")
def groups_are_compared(c: Config) -> Iterator[str]:
    if not _is_policy(c) or c.reinforce.group_size > 1:
        return
    if c.reinforce.loss_type in _COMPARED:
        yield "`reinforce.loss_type` compares the answers of a group: `reinforce.group_size`"
    if c.reinforce.drops_equal_groups:
        yield "`reinforce.drops_equal_groups` would drop all: `reinforce.group_size`"


@rule("leave reinforce.advantage_scale at null, or set it to batch or none")
def scales_fit_the_loss(c: Config) -> Iterator[str]:
    if c.reinforce.advantage_scale == "group" and c.reinforce.loss_type not in _COMPARED:
        yield "`reinforce.advantage_scale`: groups are not compared in `reinforce.loss_type`"


@rule("set reinforce.kl_in_reward=true, or take k2 or k3")
def divergences_pull(c: Config) -> Iterator[str]:
    if _is_policy(c) and c.reinforce.loss_kl_coef and c.reinforce.kl_estimator == "k1":
        yield "the gradient of `reinforce.kl_estimator` in the loss has a mean of 0"


@rule("take reinforce.correction_low below correction_high")
def corrections_have_a_range(c: Config) -> Iterator[str]:
    if c.reinforce.correction_low >= c.reinforce.correction_high:
        yield "`reinforce.correction_low` and `reinforce.correction_high` leave no weight"


@rule("give temperature above 0, top_k, top_p and min_p")
def sampling_is_known(c: Config) -> Iterator[str]:
    sampling = c.reinforce.sampling
    unknown = sampling.keys() - _SAMPLING
    if unknown:
        yield f"`reinforce.sampling` has no {', '.join(sorted(unknown))}"
    if not 0 < c.reinforce.temperature < float("inf"):
        yield "`reinforce.sampling` has no temperature that answers can be drawn with"
    if not all(number >= 0 for number in sampling.values()):
        yield "`reinforce.sampling` has a number below 0"


@rule("set reinforce.correction=none, or leave out top_k, top_p and min_p")
def corrections_see_all_words(c: Config) -> Iterator[str]:
    reinforce = c.reinforce
    limits = [name for name, free in _LIMITS.items() if reinforce.sampling.get(name, free) != free]
    if reinforce.correction != "none" and limits:
        yield f"`reinforce.correction`: {limits[0]} cuts words off that the trainer rates"


@rule("take at most reinforce.max_new_tokens")
def penalties_fit_answers(c: Config) -> Iterator[str]:
    if c.reinforce.overlong_tokens > c.reinforce.max_new_tokens:
        yield "`reinforce.overlong_tokens` is above `reinforce.max_new_tokens`"


@rule("set mesh.pp=1")
def policies_have_no_pipeline(c: Config) -> Iterator[str]:
    computes = c.reinforce.reads_old or c.reinforce.reads_reference
    if _is_policy(c) and c.mesh.pp > 1 and computes and not c.data.mock:
        yield "`mesh.pp`: log-probabilities that `reinforce` asks for need a mesh without pipeline"


@rule("set data.document_mask=true")
def rollouts_are_documents(c: Config) -> Iterator[str]:
    if _is_policy(c) and not c.data.document_mask:
        yield "answers of a row would see each other: `data.document_mask`"


REINFORCE_RULES = rules_of(globals())
