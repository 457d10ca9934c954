"""Oracle: a model that came from transformers, fine-tuned here, goes back whole.

Tokenizer, chat template, token ids and generation config of the exported folder are those of the
model it started from, and transformers generates from it what `mjax.generate.__main__` does.
"""

import json

import jax
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mjax.config import load
from mjax.convert import main as convert
from mjax.generate.__main__ import main as generate
from mjax.interop.pretrained import source_of
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from tests.marks import quick
from tests.oracle.families import MODELS

FAMILIES = ["llama2", "qwen3", "gemma2"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TURN_ENDS = "<|end|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TEXT = "the quick brown fox jumps over the lazy dog and runs through the wood to its den\n"
CHAT = [{"role": "user", "content": " the quick dog "}, {"role": "assistant", "content": "runs"}]
PROMPT = "the lazy fox"
NEW = 12  # tokens


def make_folder(folder, family: str) -> None:
    """A model as transformers saves it, with a tokenizer made here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", TURN_ENDS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"special_tokens": special, "initial_alphabet": alphabet[:200]}
    trainer = trainers.BpeTrainer(vocab_size=251, show_progress=False, **options)
    tokenizer.train_from_iterator([TEXT], trainer)
    begin = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=begin
    )
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    prefix, options = MODELS[family]
    config = getattr(transformers, f"{prefix}Config")(**options)
    torch.manual_seed(1)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0, repetition_penalty=1.0
    )
    model.save_pretrained(folder)


@pytest.mark.parametrize("family", quick(FAMILIES, 0))
def test_a_fine_tuned_model_goes_back_to_transformers_whole(family, tmp_path, monkeypatch, capsys):
    hf, out, run = tmp_path / "hf", tmp_path / "out", tmp_path / "run"
    make_folder(hf, family)
    (tmp_path / "text.txt").write_text(TEXT * 40)
    model = source_of(hf).cfg.model_dump(mode="json", exclude_none=True)
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"model": model}))
    keys = [f"checkpoint.init_from={hf}", f"run.dir={run}", f"data.text={tmp_path}/text.txt"]
    keys += [f"data.tokenizer={hf}", "data.seq_length=16", "train.steps=3", "schedule.lr=1e-3"]
    keys += ["train.global_batch_size=4", "train.micro_batch_size=4", "precision.compute=float32"]
    cfg = load(config, keys)
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    argv = ["convert", "export", "--ckpt", run, "--hf", out, "--dtype", "float32", "--verify"]
    monkeypatch.setattr("sys.argv", [str(arg) for arg in argv])
    assert convert() == 0

    before, after = (transformers.AutoTokenizer.from_pretrained(f) for f in (hf, out))
    for options in ({"tokenize": False}, {"add_generation_prompt": True, "tokenize": False}):
        text = after.apply_chat_template(CHAT, **options)
        assert text == before.apply_chat_template(CHAT, **options) and "quick dog" in text
    assert after(TEXT)["input_ids"] == before(TEXT)["input_ids"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(after, name) == getattr(before, name) is not None

    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tuned = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(theirs.config, name) == getattr(tuned.config, name) is not None
        one, other = (getattr(m.generation_config, name) for m in (theirs, tuned))
        assert one == other is not None
    moved = [
        not torch.equal(a, b)
        for a, b in zip(theirs.state_dict().values(), tuned.state_dict().values(), strict=True)
    ]
    assert any(moved), "the export holds the fine-tuned weights"

    ids = after(PROMPT, return_tensors="pt")
    made = theirs.generate(**ids, do_sample=False, max_new_tokens=NEW)[
        0, ids["input_ids"].size(1) :
    ]
    capsys.readouterr()
    argv = ["--ckpt", str(run), "--prompt", PROMPT, "--max-new-tokens", str(NEW), "--logprobs"]
    generate([*argv, "--temperature", "0"])  # its tokenizer is in the checkpoint
    ours = [int(line.split("\t")[0]) for line in capsys.readouterr().out.splitlines()]
    ends = theirs.generation_config.eos_token_id
    assert ours == [token for token in made.tolist() if token not in ends or token in ours]
    assert len(ours) == NEW or made[-1] in ends
