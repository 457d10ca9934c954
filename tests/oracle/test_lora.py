"""Training with adapters against PEFT: the loss and the gradient of each adapter of one step."""

import jax
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file

from mjax.checkpoint.merged import Adapters
from mjax.config import load
from mjax.interop.peft.adapter_reader import read_adapter
from mjax.interop.peft.adapter_writer import write_adapter
from mjax.interop.sources import source_of
from mjax.models import definition_of
from mjax.models.base.adapted import is_of_adapter
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.oracle.families import make

peft = pytest.importorskip("peft")

ROWS, WIDTH, RANK = 2, 12, 4
ALPHA = 3  # of 12, fp32 alone moves gradients by more than the bound, torch's too
BOUND = 1e-5  # of the loss, and of a gradient over its largest entry
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES = {
    "lora": ({}, []),
    "rslora": ({"use_rslora": True}, ["lora.rslora=true"]),
    "dora": ({"use_dora": True}, ["lora.dora=true"]),
}
KEYS = [
    "data.mock=true",
    f"data.seq_length={WIDTH}",
    "train.attention=xla",
    f"train.global_batch_size={ROWS}",
    "precision.compute=float32",
    "optimizer.clip_grad_norm=0.0",
    "schedule.warmup_steps=0",
    f"lora.rank={RANK}",
    f"lora.alpha={ALPHA}",
]


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_peft(name, tmp_path):
    of_peft, keys = CASES[name]
    torch.manual_seed(0)
    base = make("llama2")
    base.save_pretrained(tmp_path / "base")
    modules = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
    options = {"r": RANK, "lora_alpha": ALPHA, "target_modules": modules, **of_peft}
    options |= {"init_lora_weights": False, "task_type": "CAUSAL_LM"}
    theirs = peft.get_peft_model(base, peft.LoraConfig(**options))
    with torch.no_grad():
        for path, parameter in theirs.named_parameters():
            if "magnitude" in path:
                parameter.mul_(1.0 + 0.3 * torch.rand_like(parameter))
    theirs.save_pretrained(tmp_path / "adapter")
    theirs.double()  # of the same numbers
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 250, (ROWS, WIDTH + 1))
    mask = (rng.random((ROWS, WIDTH)) < 0.6).astype(np.float32)

    logits = theirs(torch.as_tensor(ids[:, :-1])).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.as_tensor(ids[:, 1:]).flatten(), reduction="none"
    )
    loss = (losses * torch.as_tensor(mask).flatten()).sum() / mask.sum()
    loss.backward()

    given = [f"checkpoint.init_from={tmp_path / 'base'}", f"lora.init={tmp_path / 'adapter'}"]
    source = source_of(tmp_path / "base")
    cfg = load(None, [*KEYS, *given, *keys]).model_copy(update={"model": source.cfg})
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    trainer.load_params(source)
    found = trainer.step(batch_of(ids, mask))
    assert float(found["loss"]) == pytest.approx(float(loss), rel=BOUND)

    moments = flatten_dict(jax.device_get(trainer.state["opt"]["mu"]))
    gradients = {path: 10 * mu for path, mu in moments.items()}  # 1 / (1 - optimizer.b1)
    assert all(map(is_of_adapter, gradients))
    specs = definition_of(source.cfg).specs
    adapters = read_adapter(tmp_path / "adapter", source.cfg, specs)
    assert gradients.keys() == adapters.arrays.keys()
    written = Adapters(gradients, adapters.scales, rslora=adapters.rslora)
    write_adapter(tmp_path / "gradients", source.cfg, specs, written)
    ours = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    wanted = {}
    for path, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            wanted[path.replace(".default", "").removesuffix(".weight")] = parameter.grad.numpy()
    ours = {path.removesuffix(".weight"): gradient for path, gradient in ours.items()}
    assert ours.keys() == wanted.keys()
    for path, gradient in wanted.items():
        assert np.abs(ours[path] - gradient).max() <= BOUND * np.abs(gradient).max(), path


def batch_of(ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    places = np.broadcast_to(np.arange(WIDTH, dtype=np.int32), mask.shape)
    return {
        "tokens": ids[:, :-1].astype(np.int32),
        "labels": ids[:, 1:].astype(np.int32),
        "loss_mask": mask,
        "segment_ids": np.ones(mask.shape, np.int32),
        "positions": places,
    }
