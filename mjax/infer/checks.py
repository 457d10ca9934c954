"""Limits that a model sets to its engine, and requests that can never run."""

import operator
from collections.abc import Collection, Sequence
from dataclasses import replace

from mjax.config.languages.layer_pattern import BRANCHES
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError, or_user_error
from mjax.infer.drafting.multi_token import PredictedTokens
from mjax.infer.drafting.repeated_texts import RepeatedTexts
from mjax.infer.requests import SamplingParams
from mjax.infer.scheduling.scheduler import Limits

DTYPES = "bfloat16", "float32", "float16"
DRAFTERS = {"ngram": RepeatedTexts, "mtp": PredictedTokens}


def require_decoder(cfg: ModelConfig) -> None:
    """Raise `UserError` for a model with an encoder, whose tokens see those that follow."""
    architecture = cfg.architecture
    if architecture.reads_neighbors:
        raise UserError(
            f"model.layer_pattern={cfg.layer_pattern}: generation with retrieval (R blocks) is not "
            "built; train.eval_interval gives the held-out loss (docs/models/encoders.md)"
        )
    if cfg.num_labels:
        raise UserError(
            f"model.num_labels={cfg.num_labels}: a model that scores texts continues none and "
            "gives them no probability; `mjax evaluate loss --run RUN` measures it"
        )
    if architecture.reads_target or not architecture.generates:
        raise UserError(
            f"model.layer_pattern={cfg.layer_pattern}: an encoder (B blocks, or V and no P) "
            "continues no text and gives a text no probability; use it by mjax.from_pretrained "
            "(docs/models/encoders.md, docs/models/multimodal.md)"
        )


def limits_of(cfg: ModelConfig, given: Limits, batch_invariant: bool) -> Limits:
    """Limits that a model allows: its length, and one prompt at a time where it has states."""
    length = given.length
    if cfg.position_embedding != "relative":
        length = min(length, cfg.max_position_embeddings)
    alone = given.prefill_alone or keeps_states(cfg)
    once = given.computes_once or batch_invariant
    return replace(given, length=length, prefill_alone=alone, computes_once=once)


def text_length(cfg: ModelConfig, asked: int | None) -> int:
    """Tokens of the longest text to serve; None: of the model. Raises `UserError` for more."""
    most = cfg.max_position_embeddings
    if asked is not None and asked > most and cfg.position_embedding != "relative":
        raise UserError(
            f"max_model_len={asked}: the model has {most} positions; give at most {most}, or "
            "leave it out"
        )
    return most if asked is None else asked


def keeps_states(cfg: ModelConfig) -> bool:
    """Whether a branch keeps a state, which only all tokens before give."""
    return any(BRANCHES[word].role == "recurrent" for word in cfg.branches)


def snapshots_of(cfg: ModelConfig, limits: Limits) -> int:
    """Slots for states that prompts of an equal beginning go on from, beside those of rows.

    0 where bits must not depend on what is cached, as those of a scan depend on its chunks.
    """
    return max(limits.rows // 4, 2) if keeps_states(cfg) and not limits.computes_once else 0


def longest_window(cfg: ModelConfig) -> int | None:
    """The tokens that a query sees if each attention layer has a window."""
    attention = [BRANCHES[word] for word in cfg.branches if BRANCHES[word].has_heads]
    if attention and all(branch.windowed for branch in attention):
        return cfg.attention.sliding_window
    return None


def check_engine(cfg: ModelConfig, dtype: str, cache_dtype: str | None) -> None:
    """Raise `UserError` for options that an engine of this model does not have."""
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype}: give one of {', '.join(DTYPES)}")
    if cache_dtype not in (None, "fp8"):
        raise UserError(
            f"cache_dtype={cache_dtype} (LLM: kv_cache_dtype): give fp8, or nothing for the "
            "model's own"
        )
    has_keys = any(BRANCHES[word].shape == "attention" for word in cfg.branches)
    if cache_dtype and (cfg.position_embedding == "relative" or not has_keys):
        raise UserError(
            f"cache_dtype={cache_dtype}: model.layer_pattern={cfg.layer_pattern} caches no keys "
            "and values in pages, and its other caches keep their dtype; leave it out"
        )


def check_drafts(cfg: ModelConfig, drafts: int, drafter: object) -> None:
    """Raise `UserError` for guesses that an engine of this model does not have."""
    if drafts < 0 or (drafts and keeps_states(cfg)):
        raise UserError(
            f"drafts={drafts}: give 0 or more, and 0 for a model with recurrent layers, whose "
            "states do not go back before a wrong guess"
        )
    if isinstance(drafter, str) and drafter not in DRAFTERS:
        raise UserError(f"speculative_method={drafter}: give one of {', '.join(DRAFTERS)}")
    if drafter == "mtp" and not (drafts and cfg.num_nextn_predict_layers):
        raise UserError(
            f"speculative_method=mtp with num_speculative_tokens={drafts} and a model of "
            f"{cfg.num_nextn_predict_layers} layers of multi-token prediction "
            "(model.num_nextn_predict_layers): it needs some of both"
        )


def check_stages(drafter_depths: int) -> None:
    """Raise `UserError` for an option of an engine that stages of layers lack."""
    if drafter_depths:
        raise UserError(
            "speculative_method=mtp with pp or pipeline_parallel_size above 1: layers of "
            "multi-token prediction have no stage; take ngram, or no stages"
        )


def ids_of(prompt: Sequence[int]) -> list[int]:
    """A prompt as integers. Raises `UserError` where it is something else."""
    wrong = f"a prompt is a {type(prompt).__name__}: {{reason}}; give a list of token ids"
    with or_user_error(wrong, TypeError):
        return [operator.index(token) for token in prompt]


def check_request(
    cfg: ModelConfig,
    prompt: Sequence[int],
    params: SamplingParams,
    length: int,
    adapters: Collection[str],
) -> None:
    """Raise `UserError` for a request that cannot be served.

    length: tokens of the longest text. adapters: their names.
    """
    if not isinstance(params, SamplingParams):
        raise UserError(f"params is a {type(params).__name__}; give SamplingParams(..)")
    has_source = cfg.architecture.reads_target
    if params.adapter is not None and params.adapter not in adapters:
        have = ", ".join(adapters) or "none"
        raise UserError(
            f"SamplingParams: adapter={params.adapter} is not among those of the engine: {have}"
        )
    if params.prompt_logprobs is not None and has_source:
        raise UserError(
            "SamplingParams: prompt_logprobs: an encoder reads the prompt, which has none; leave "
            "it out"
        )
    if not prompt or min(prompt) < 0 or max(prompt) >= cfg.vocab_size:
        raise UserError(
            f"a prompt of {len(prompt)} tokens: give one or more ids in [0, "
            f"{cfg.vocab_size}), by the tokenizer that the model was trained with"
        )
    if len(prompt) >= length + has_source:
        raise UserError(
            f"a prompt of {len(prompt)} tokens leaves no room for a new one within "
            f"{length}, the longest text here; shorten it"
        )
