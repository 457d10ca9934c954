"""What the head costs a pipeline, and which stages would make up for it: an estimate.

Devices run in lock step, so a tick lasts as long as its slowest device, and the last stage has the
head beside its layers. Times are in layers, forward (1/3) and backward (2/3) together; the head's
forward and backward both stand in the forward tick of the last stage (`run.py`). The embedding is a
look-up and counts nothing. FLOPs decide, as in `train/metrics.py`: measure before you believe it.
"""

import numpy as np

from mjax.config.schema import Config, ModelConfig
from mjax.models.flops import flops_per_token
from mjax.pipeline.layout import Layout, layout_of, make_layout
from mjax.pipeline.schedule import Schedule, make_schedule

WORTH = 0.02  # a gain below this share of the step is not worth a word


def head_in_layers(model: ModelConfig, seq_length: int) -> float:
    """FLOPs of the head over those of a layer (the mean of all)."""
    head = 6.0 * model.hidden_size * model.vocab_size
    layers = flops_per_token(model, seq_length) - head
    return head * model.num_hidden_layers / layers


def step_time(layout: Layout, schedule: Schedule, head: float) -> float:
    """Sum over ticks of the slowest device's time, in layers; `head`: that of the head."""
    sizes, stage = (layout.table() >= 0).sum(-1), np.arange(layout.pp)
    forward, backward = schedule.forward, schedule.backward
    forward_layers = sizes[stage, forward.chunk] * forward.on
    backward_layers = sizes[stage, backward.chunk] * backward.on
    time = (forward_layers + 2 * backward_layers) / 3
    time[:, -1] += head * forward.on[:, -1] * (forward.chunk[:, -1] == layout.v - 1)
    return float(time.max(1).sum())


def candidates(cfg: Config) -> dict[str, Layout]:
    """Config key -> layout of as many stages: the loss counted as a layer, or any number of layers
    in the last stage and the others equal."""
    now = layout_of(cfg)
    layers, stages = len(now.kinds), now.pp * now.v
    found = {}
    if layers + 1 >= stages:
        key = "mesh.pipeline_account_for=[loss]"
        found[key] = make_layout(now.kinds, now.pp, now.v, account_for=["loss"])
    for last in range(layers - stages + 2) if stages > 1 else ():
        rest, longer = divmod(layers - last, stages - 1)
        sizes = [rest + (i < longer) for i in range(stages - 1)] + [last]
        text = f"E{'|'.join(f't*{n}' if n > 1 else 't' * n for n in sizes)}L"
        found[f"mesh.pipeline_layout='{text}'"] = make_layout(now.kinds, now.pp, layout=text)
    return {key: made for key, made in found.items() if made.runs_all_stacks}


def advice(cfg: Config, micro_batches: int) -> list[str]:
    """What the head costs, and the key that would make the step shorter, if any does."""
    head = head_in_layers(cfg.model, cfg.data.seq_length)
    now = layout_of(cfg)
    schedule = make_schedule(now.pp, now.v, micro_batches)
    time = step_time(now, schedule, head)
    share = 1 - step_time(now, schedule, 0) / time
    lines = [f"head        {head:.2f} layers of FLOPs on the last stage: {share:.1%} of the step"]
    others = {key: step_time(made, schedule, head) for key, made in candidates(cfg).items()}
    best = min(others.values(), default=time)
    if best < (1 - WORTH) * time:
        key = next(k for k, t in others.items() if t <= best + WORTH * time)  # the simplest first
        lines.append(f"            {key} would take {others[key] / time:.1%} of that (estimate)")
    return lines
