"""The rules about `reinforce`: a part of the table of rules (`validate.py`)."""

from collections.abc import Iterator

from mjax.config.rules.rule import rule, rules_of
from mjax.config.schema.run import Config

_WITHOUT_GROUPS = "reinforce_pp", "ppo"
_NO_LIMITS = {"top_k": 0, "top_p": 1, "min_p": 0}


def draws_answers(c: Config) -> bool:
    """Whether some steps are on answers that the model draws."""
    if c.train.objective == "distill":
        return c.distill.student_share > 0
    return c.train.objective in ("policy", "value")


@rule("take reinforce.group_size of 2 or more; reinforce_pp and ppo compare no groups")
def groups_are_compared(c: Config) -> Iterator[str]:
    reinforce = c.reinforce
    compares = reinforce.drops_equal_groups or reinforce.loss_type not in _WITHOUT_GROUPS
    if reinforce.group_size == 1 and compares and c.train.objective != "distill":
        yield "`reinforce.group_size` leaves `reinforce.loss_type` nothing to compare"


@rule("leave reinforce.advantage_scale at null, or set it to batch or none")
def scales_fit_the_loss(c: Config) -> Iterator[str]:
    if c.reinforce.advantage_scale == "group" and c.reinforce.loss_type in _WITHOUT_GROUPS:
        yield "`reinforce.advantage_scale`: `reinforce.loss_type` compares no groups"


@rule("set reinforce.kl_in_reward=true, or take k2 or k3")
def divergences_pull(c: Config) -> Iterator[str]:
    reinforce = c.reinforce
    if reinforce.kl_coef and reinforce.kl_estimator == "k1" and not reinforce.kl_in_reward:
        yield "the gradient of `reinforce.kl_estimator` in the loss has a mean of 0"


@rule("lower the first, or raise the second")
def bounds_are_in_order(c: Config) -> Iterator[str]:
    reinforce = c.reinforce
    if reinforce.correction_low >= reinforce.correction_high:
        yield "`reinforce.correction_low` is not below `reinforce.correction_high`"
    if reinforce.overlong_tokens > reinforce.max_new_tokens:
        yield "`reinforce.overlong_tokens` is above `reinforce.max_new_tokens`"


@rule("give temperature above 0, and top_k, top_p and min_p of 0 or more")
def sampling_is_known(c: Config) -> Iterator[str]:
    sampling = c.reinforce.sampling
    unknown = sampling.keys() - {"temperature", *_NO_LIMITS}
    numbers_fit = all(0 <= number < float("inf") for number in sampling.values())
    if unknown or not numbers_fit or not c.reinforce.temperature:
        yield "`reinforce.sampling` has a name or a number that it cannot take"


@rule("set reinforce.correction=none, or leave out top_k, top_p and min_p")
def corrections_see_all_words(c: Config) -> Iterator[str]:
    limits = {name: c.reinforce.sampling.get(name, free) for name, free in _NO_LIMITS.items()}
    if c.reinforce.correction != "none" and limits != _NO_LIMITS:
        yield "`reinforce.correction`: `reinforce.sampling` cuts words off that the trainer rates"


@rule("set mesh.pp=1")
def critics_have_no_pipeline(c: Config) -> Iterator[str]:
    if c.mesh.pp > 1 and c.reinforce.loss_type == "ppo" and not c.data.mock:
        yield "`mesh.pp`: the critic of `reinforce.loss_type` needs a mesh without pipeline"


REINFORCE_RULES = rules_of(globals())
