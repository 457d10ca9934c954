"""The rules about `reinforce`: a part of the table of rules (`validate.py`)."""

from collections.abc import Iterator

from mjax.config.rules.rule import rule, rules_of
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import Config

_WITHOUT_GROUPS = "reinforce_pp", "ppo"
_NO_LIMITS = {"top_k": 0, "top_p": 1, "min_p": 0}


_IN_BLOCKS = {"full", "window", "nope", "nope_window", "mlp"}  # branches


def lacks_blocks(model: ModelConfig) -> str | None:
    """The key of a model that blocks of tokens (`models/runtime/token_blocks.py`) lack, or None."""
    has = {
        "layer_pattern": not model.branches <= _IN_BLOCKS,
        "position_embedding": model.position_embedding != "rope",
        "rope.rope_scaling": getattr(model.rope.rope_scaling, "rope_type", None) == "longrope",
        "attention.attention_sinks": model.attention.attention_sinks,
        "attention.attention_dropout": model.attention.attention_dropout > 0,
        "hidden_dropout": model.hidden_dropout > 0,
        "embedding_multiplier": model.embedding_multiplier is not None,
        "num_nextn_predict_layers": model.num_nextn_predict_layers > 0,
        "num_labels": bool(model.num_labels),
    }
    return next((name for name, found in has.items() if found), None)


def trains_in_blocks(c: Config) -> bool:
    """Whether a policy's forward pass is in the batch-invariant mode of its engine."""
    is_policy = c.train.objective == "policy" or ":" in c.train.objective
    return is_policy and bool(c.reinforce.engine.get("batch_invariant"))


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


@rule("give whole numbers of 1 or more, and true or false")
def engines_have_whole_sizes(c: Config) -> Iterator[str]:
    invariant = c.reinforce.engine.get("batch_invariant", False)
    if type(invariant) is not bool:
        yield f"`reinforce.engine`: batch_invariant is {invariant!r}"
    for name in ("devices", "dp", "tp", "pp", "ep"):
        size = c.reinforce.engine.get(name, 1)
        if type(size) is not int or size < 1:
            yield f"`reinforce.engine`: {name} is {size!r}"


@rule("set mesh.pp=1")
def critics_have_no_pipeline(c: Config) -> Iterator[str]:
    if c.mesh.pp > 1 and c.reinforce.loss_type == "ppo" and not c.data.mock:
        yield "`mesh.pp`: the critic of `reinforce.loss_type` needs a mesh without pipeline"


@rule("leave batch_invariant out of reinforce.engine, or change the key")
def invariant_steps_are_built(c: Config) -> Iterator[str]:
    if not trains_in_blocks(c):
        return
    engine, mesh, limits = c.reinforce.engine, c.mesh, _NO_LIMITS.items()
    has = {
        "reinforce.sampling": any(c.reinforce.sampling.get(n, v) != v for n, v in limits),
        "precision.compute": c.precision.compute == "float16",
        "precision.fp8": c.precision.fp8 != "none",
        "precision.weights": c.precision.weights != "plain",
        "data.shared_prefixes": c.data.shared_prefixes,
        "train.neftune_alpha": c.train.neftune_alpha > 0,
        "lora.rank": c.lora.rank > 0,
    }
    has |= {f"mesh.{axis}": getattr(mesh, axis) > 1 for axis in ("pp", "ep", "cp", "tp")}
    lacking = lacks_blocks(c.model)
    keys = [] if lacking is None else [f"model.{lacking}"]
    keys += [name for name, found in has.items() if found]
    for key in keys:
        yield f"`{key}`: trainer and engine are not built to agree to the bit with it"
    plain = {"weight_dtype": None, "cache_dtype": None, "tp": 1, "pp": 1, "ep": 1}
    for name in [name for name, value in plain.items() if engine.get(name, value) != value]:
        yield f"`reinforce.engine`: {name} is not built to agree with the trainer to the bit"


REINFORCE_RULES = rules_of(globals())
