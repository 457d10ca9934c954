"""Held-out data besides that of `valid_paths` or the second share: sets by name, and the test.

Invariant: the test has the documents that `data.split` leaves after training and evaluations, those
of Megatron-LM's third split.
"""

from pathlib import Path

from mjax.config.schema.run import Config
from mjax.data.corpus.text import prepare_text
from mjax.data.loader import Dataset, build_datasets

OF_SETS = "eval_sets"  # folder within the run's: tokenized texts


def eval_datasets(cfg: Config, count: int) -> dict[str, Dataset]:
    """The sets of `data.eval_sets`, each of `count` samples; none for a count of 0."""
    if not count:
        return {}
    return {name: _set(cfg, name, count) for name in cfg.data.eval_sets}


def _set(cfg: Config, name: str, count: int) -> Dataset:
    """One of `data.eval_sets`: prefixes, files of conversations, or a text that is tokenized."""
    paths = cfg.data.eval_sets[name]
    changed: dict[str, object] = {"valid_paths": [paths] if isinstance(paths, str) else paths}
    if cfg.data.text:
        tokenizer = prepare_text(cfg.data, cfg.run.dir).tokenizer_path
        texts = [
            cfg.data.model_copy(update={"text": text, "tokenizer": tokenizer})
            for text in changed["valid_paths"]
        ]
        folder = Path(cfg.run.dir) / OF_SETS / name
        corpora = [prepare_text(data, folder / str(i)) for i, data in enumerate(texts)]
        changed["valid_paths"] = [corpus.prefix for corpus in corpora]
    return _held_out(cfg, changed, count)


def third_share(cfg: Config) -> Dataset:
    """The third share of `data.split`, as many samples as `train.test_steps` takes."""
    shares = cfg.data.split
    first, second = (share / sum(shares) for share in shares[:2])
    before = first + second
    count = cfg.train.test_steps * cfg.train.global_batch_size
    return _held_out(cfg, {"split": [before, 1.0 - before, 0.0]}, count)


def _held_out(cfg: Config, changed: dict, count: int) -> Dataset:
    """Held-out data with these keys of `data`."""
    data = cfg.data.model_copy(update=changed)
    _, found = build_datasets(cfg.model_copy(update={"data": data}), 0, count)
    return found
