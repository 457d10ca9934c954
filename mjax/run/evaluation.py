"""The held-out loss of a run, and what is said with it at the end: a bigram table's, a sample.

Invariant: every evaluation reads the same batches, so that its figures compare.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from mjax.config.schema.run import Config
from mjax.data.base.tokenizer import Tokenizer, load_tokenizer
from mjax.data.corpus.bigram import bigram_cross_entropy
from mjax.data.corpus.gpt import split_tokens
from mjax.data.corpus.text import prepare_text
from mjax.errors import UserError
from mjax.infer.generate import Generator
from mjax.infer.sample import Sampling
from mjax.objectives.fields import HostBatch
from mjax.objectives.objective import NEXT_TOKEN
from mjax.run.batches import BatchStream, RowsOf
from mjax.run.monitor.metrics import Record
from mjax.train.step import LOSSES
from mjax.train.trainer import Trainer

MAX_BIGRAM_TOKENS = 20_000_000  # training tokens that the bigram table is made from


@dataclass(frozen=True)
class HeldOut:
    """Evaluates a trainer on data that it is not trained on."""

    trainer: Trainer
    stream: BatchStream

    def loss(self, beat: Callable[[], None]) -> Record:
        """The objective's losses and measures by name, `eval_loss` first; `eval_tokens`, its count.

        A loss or measure with no counted entry is None. `beat` is called after every batch.
        """
        found: list = []
        for batch in self.batches(self.trainer.local_rows):
            found.append(self.trainer.run_program(LOSSES, batch))
            beat()
            if len(found) > 1:  # one late, so that no more than two batches wait on the device
                found[-2] = jax.device_get(found[-2])
        totals, counts = jax.tree.map(
            lambda *x: np.sum(x, dtype=np.float64), *jax.device_get(found)
        )
        record = {"eval_loss": 0.0, "eval_tokens": int(counts["loss"])}
        for name, count in counts.items():
            record[f"eval_{name}"] = float(totals[name] / count) if count else None
        return record

    def nothing(self) -> str:
        """A line on held-out samples of which none counts."""
        train = self.trainer.cfg.train
        names = self.stream.describe(0, train.eval_steps, 3)
        return f"held-out loss: there is none, for nothing of its samples counts: {names}"

    def batches(self, rows: RowsOf = None) -> Iterator[HostBatch]:
        """The batches of an evaluation, numpy [B, S] fields; `rows`: the part of this process."""
        return self.stream.batches(0, self.trainer.cfg.train.eval_steps, rows)

    def bigram_line(self, loss: float) -> str | None:
        """A line with `loss` beside what a table of token pairs reaches; None where not comparable.

        Only the loss of next tokens on `data.text` is.
        """
        cfg = self.trainer.cfg
        if cfg.train.objective != NEXT_TOKEN or not cfg.data.text:
            return None
        corpus = prepare_text(cfg.data, cfg.run.dir)
        training_tokens = split_tokens(corpus.prefix, "train", cfg.data.split)
        rows = []
        for batch in self.batches():
            last_label = batch["labels"][:, -1]
            rows.append(np.column_stack([batch["tokens"], last_label]))
        bigram = bigram_cross_entropy(
            training_tokens[:MAX_BIGRAM_TOKENS], np.concatenate(rows), cfg.model.vocab_size
        )
        return (
            f"held-out loss {loss:.4f}, bigram cross-entropy of the same tokens {bigram:.4f} nats"
        )


def read_prompt(cfg: Config) -> tuple[Tokenizer, list[int]] | None:
    """(the tokenizer, the ids of train.sample_prompt); None without a prompt.

    Raises `UserError` if the prompt cannot be continued at the end of the run.
    """
    text, count = cfg.train.sample_prompt, cfg.train.sample_tokens
    if text is None:
        return None
    name = cfg.data.tokenizer
    if cfg.data.text:
        name = prepare_text(cfg.data, cfg.run.dir).tokenizer_path
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode(text)
    if not ids or len(ids) + count > cfg.model.max_position_embeddings:
        raise UserError(
            f"train.sample_prompt of {len(ids)} tokens and train.sample_tokens={count} do not fit "
            f"1 to model.max_position_embeddings={cfg.model.max_position_embeddings}; change one"
        )
    return tokenizer, ids


def sample_text(trainer: Trainer, tokenizer: Tokenizer, prompt: list[int], count: int) -> str:
    """`prompt` and `count` tokens drawn from the model after it, as text."""
    model, dtype = trainer.cfg.model, trainer.cfg.precision.compute
    generator = Generator(trainer.definition, trainer.params(), model, dtype=dtype)
    (completion,) = generator.complete([prompt], count, Sampling(temperature=0.8))
    return tokenizer.decode([*prompt, *completion.ids])
