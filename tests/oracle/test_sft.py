"""Oracle: TRL's SFT on a tiny Llama has the loss and the gradients of `mjax sft`.

TRL's trainer runs for one step of two accumulated batches at a rate of 0. The answers are those of
a template that TRL ships. TRL has no loss by sequence, so that one is compared with its definition.
"""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers import trainers as tokenizer_trainers
from transformers import PreTrainedTokenizerFast, TrainerCallback

from mjax.config import load
from mjax.data.base.chat import load_chat_template
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.conversations.answers import AnswerTokenizer
from mjax.data.loader import build_datasets
from mjax.errors import UserError
from mjax.interop.pretrained import from_pretrained, source_of
from mjax.post.sft import sft_defaults
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.chats import write_lines
from tests.oracle.families import assert_gradients_near, make, save_gradients
from tests.oracle.test_conversations import tokenized

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TOKENS = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "qwen2_5": (None, "<|im_end|>", "<|im_start|>"),
}
WORDS = "the sum of two is four, and 3 more\n makes Grüße. (yes) ".split(" ")
ROWS = 8


def records() -> list[dict]:
    """Conversations of one or two answers of many lengths."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(ROWS):
        turns = int(rng.integers(1, 3))
        texts = [" ".join(rng.choice(WORDS, rng.integers(2, 7))).strip() for _ in range(2 * turns)]
        roles = ["user", "assistant"] * turns
        pairs = zip(roles, texts, strict=True)
        found.append({"messages": [{"role": role, "content": text} for role, text in pairs]})
    return found


def byte_level(special: list[str], template: str, size: int) -> Tokenizer:
    """A tokenizer with these special tokens, trained on a template and some words."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    options = {"special_tokens": special, "show_progress": False}
    trainer = tokenizer_trainers.BpeTrainer(vocab_size=size, **options)
    inner.train_from_iterator([" ".join(WORDS), "system user assistant", template], trainer)
    return inner


def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens of a template of TRL, and that template."""
    special = ["<pad>", *filter(None, TOKENS[name])]  # the model has no gradient of id 0
    template = (TEMPLATES / f"{name}_training.jinja").read_text()
    inner = byte_level(special, template, 251)
    bos, eos, *_ = TOKENS[name]
    named = {"bos_token": bos} if bos else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=eos, pad_token="<pad>", **named
    )
    tokenizer.chat_template = template
    return tokenizer


class Keep(TrainerCallback):
    """Keeps the gradients of a step, which the trainer clears after it."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients = [p.grad.clone() for p in model.parameters()]


def theirs_after_a_step(folder: Path, model, tokenizer) -> tuple[float, list[torch.Tensor]]:
    """(the loss that TRL logs, the gradients that its optimizer gets)."""
    options = trl.SFTConfig(
        output_dir=str(folder),
        assistant_only_loss=True,
        max_length=512,
        per_device_train_batch_size=ROWS // 2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        learning_rate=0.0,
        max_grad_norm=0.0,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    keep = Keep()
    trainer = trl.SFTTrainer(
        model=model,
        args=options,
        train_dataset=datasets.Dataset.from_list(records()),
        processing_class=tokenizer,
        callbacks=[keep],
    )
    trainer.train()
    (loss,) = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return loss, keep.gradients


def ours(folder: Path, *keys: str) -> tuple[float, dict, dict]:
    """(the loss, the gradients and the batch of all conversations in packed rows)."""
    path = write_lines(folder / "chats.jsonl", records())
    given = [f"checkpoint.init_from={folder / 'hf'}", f"data.conversations.path={path}"]
    given += [
        "data.seq_length=128",
        "data.conversations.too_long=refuse",
        "data.split=[1,0,0]",
        f"run.dir={folder / 'run'}",
    ]
    given += ["precision.compute=float32", "train.micro_batch_size=1", *keys]

    def config(rows: int):
        return load(None, [*given, f"train.global_batch_size={rows}"], sft_defaults)

    count = len(build_datasets(config(1), 1, 0)[0].rows.ranks)
    assert 1 < count <= ROWS
    cfg = config(count)
    data, _ = build_datasets(cfg, count, 0)
    batch = data.global_batch(np.arange(count), slice(None))
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    trainer.load_params(source_of(folder / "hf"))
    loss, _, gradients = trainer.grads(batch)
    return float(loss), jax.device_get(gradients), batch


def compare(found: dict, theirs, gradients: list[torch.Tensor], folder: Path) -> None:
    for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
        parameter.grad = gradient
    saved = from_pretrained(save_gradients(theirs, make("llama2"), folder / "grads")).params
    assert_gradients_near(found, saved)


@pytest.mark.parametrize("name", TOKENS)
def test_by_token_it_is_trls(name, tmp_path):
    theirs, tokenizer = make("llama2"), chat_tokenizer(name)
    theirs.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    wanted, gradients = theirs_after_a_step(tmp_path / "trl", theirs, tokenizer)
    loss, found, batch = ours(tmp_path)
    assert loss == pytest.approx(wanted, abs=1e-4)  # TRL rounds what it logs
    assert batch["loss_mask"].sum() > 50
    compare(found, theirs, gradients, tmp_path)


def test_by_sequence_it_is_the_mean_of_means(tmp_path):
    theirs, tokenizer = make("llama2"), chat_tokenizer("llama3")
    theirs.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    losses = []
    for record in records():
        read = tokenizer.apply_chat_template(
            record["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        ids, mask = (torch.tensor(read[key]) for key in ("input_ids", "assistant_masks"))
        logits = theirs(ids[None, :-1]).logits[0]
        each = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        losses.append((each * mask[1:]).sum() / mask[1:].sum())
    wanted = torch.stack(losses).mean()
    wanted.backward()
    loss, found, _ = ours(tmp_path, "train.loss_divisor=sequences")
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    compare(found, theirs, [p.grad for p in theirs.parameters()], tmp_path)
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "llama"


SPECIAL = re.compile(r"<[|｜][\w▁ ]+[|｜]>|<\w+_of_\w+>|</?think>|</?s>")
ENDS = "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"
REFUSED = {"gptoss": "rewrites earlier turns"}  # reasoning of earlier turns is taken out
IMAGES = {"llava_next"}  # a content is a list of parts


def test_masks_of_every_template_that_trl_ships(tmp_path):
    names = {path.name.removesuffix("_training.jinja") for path in TEMPLATES.glob("*_training.*")}
    assert len(names) > 25
    for name in sorted(names - IMAGES):
        template = (TEMPLATES / f"{name}_training.jinja").read_text()
        special = sorted({*SPECIAL.findall(template)})
        end = next((token for token in ENDS if token in special), "<eos>")
        tokens = {"bos_token": "<bos>", "eos_token": end, "pad_token": "<pad>"}
        inner = byte_level([*dict.fromkeys([*tokens.values(), *special])], template, 600)
        theirs = PreTrainedTokenizerFast(tokenizer_object=inner, **tokens)
        (folder := tmp_path / name).mkdir()
        inner.save(str(folder / "tokenizer.json"))
        said = json.dumps(tokens | {"chat_template": template})
        (folder / "tokenizer_config.json").write_text(said)
        ours = AnswerTokenizer(load_tokenizer(folder), load_chat_template(folder))
        if name in REFUSED:
            with pytest.raises(UserError, match=REFUSED[name]):
                tokenized(ours, records())
            continue
        for found, record in zip(tokenized(ours, records()), records(), strict=True):
            wanted = theirs.apply_chat_template(
                record["messages"],
                chat_template=template,
                return_assistant_tokens_mask=True,
                return_dict=True,
            )
            count, mask = len(found.ids), wanted["assistant_masks"]
            assert found.ids.tolist() == wanted["input_ids"][:count], name
            np.testing.assert_array_equal(found.is_answer, np.bool_(mask[:count]), name)
            assert not any(mask[count:]) and found.is_answer.any(), name
