"""Samples of a run: what the model says to `train.sample_prompt`, while it trains and at the end.

On conversations a prompt is a user's message, which the chat template writes; the likeliest answer
follows. Elsewhere a prompt is a text that the model continues, at temperature 0.8.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mjax.config.schema.run import Config
from mjax.data.base.chat import ChatTemplate, load_chat_template
from mjax.data.base.chat_ids import answer_ends, reply_ids
from mjax.data.base.tokenizer import Tokenizer, load_tokenizer
from mjax.data.corpus.text import tokenizer_of_run
from mjax.errors import UserError
from mjax.infer.engine import Engine
from mjax.infer.requests import SamplingParams
from mjax.infer.small_engine import completed, small_engine
from mjax.train.trainer import Trainer


@dataclass
class Samples:
    """Prompts and what continues them.

    prompts: the ids of each. texts: their texts.
    ends: ids that end an answer; None: the prompts are continued as texts.
    """

    trainer: Trainer
    tokenizer: Tokenizer
    texts: Sequence[str]
    prompts: list[list[int]]
    ends: list[int] | None
    _engine: Engine | None = None

    def lines(self) -> list[str]:
        """A line for each prompt, with what the model makes of it now."""
        cfg, trainer = self.trainer.cfg, self.trainer
        engine, new = self._engine, cfg.train.sample_tokens
        if engine is None:
            engine = self._engine = small_engine(
                trainer.definition,
                trainer.params(),
                cfg.model,
                list(map(len, self.prompts)),
                new,
                dtype=cfg.precision.compute,
                tokenizer=self.tokenizer,
                eos=self.ends or (),
            )
        else:
            engine.update_weights(trainer.params())
            engine.wake()
        temperature = 0.8 if self.ends is None else 0.0
        params = SamplingParams(max_tokens=new, temperature=temperature, seed=0)
        found = completed(engine, self.prompts, params)
        engine.sleep(weights=True)  # training needs the memory
        if self.ends is not None:
            pairs = zip(self.texts, found, strict=True)
            return [f"sample: {text!r} -> {made.text!r}" for text, made in pairs]
        pairs = zip(self.prompts, found, strict=True)
        return [f"sample: {self.tokenizer.decode([*ids, *made.token_ids])}" for ids, made in pairs]


def samples_of(trainer: Trainer) -> Samples | None:
    """The samples of a run; None without a prompt.

    Raises `UserError` if a prompt cannot be continued.
    """
    cfg = trainer.cfg
    texts, count = cfg.train.sample_prompt or [], cfg.train.sample_tokens
    if not texts:
        return None
    texts = [texts] if isinstance(texts, str) else texts
    tokenizer = load_tokenizer(tokenizer_of_run(cfg.data, cfg.run.dir))
    template = _template_of(cfg)
    if template is None:
        prompts, ends = [tokenizer.encode(text) for text in texts], None
    else:
        chats = [[{"role": "user", "content": text}] for text in texts]
        prompts = [reply_ids(chat, tokenizer, template) for chat in chats]
        ends = answer_ends(tokenizer, template)
    for ids in prompts:
        if not ids or len(ids) + count > cfg.model.max_position_embeddings:
            raise UserError(
                f"train.sample_prompt of {len(ids)} tokens and train.sample_tokens={count} do not "
                f"fit 1 to model.max_position_embeddings={cfg.model.max_position_embeddings}; "
                "change one"
            )
    return Samples(trainer, tokenizer, texts, prompts, ends)


def _template_of(cfg: Config) -> ChatTemplate | None:
    """The template of a run on conversations; None where there is none, as for pairs of texts."""
    if cfg.data.conversations.path is None:
        return None
    try:
        return load_chat_template(cfg.data.tokenizer)
    except UserError:
        return None
