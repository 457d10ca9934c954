"""The cost of the head in a pipeline, and which stages would make up for it: an estimate.

Devices run in lock step, so a tick lasts as long as its slowest device, and the last stage has the
head beside its layers. The unit of time is a layer: its forward takes 1/3 and its backward 2/3. The
head's forward and backward both run in the forward tick of the last stage (`pipeline/run.py`). The
embedding is a look-up and counts nothing. Times are in proportion to FLOPs (`models/flops.py`), so
measure before you believe them.
"""

import numpy as np

from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import Config
from mjax.models.flops import flops_by_part, flops_per_token
from mjax.pipeline.layout import Layout, layout_of, make_layout
from mjax.pipeline.schedule import Schedule, make_schedule

SMALLEST_GAIN = 0.02  # share of the step's time; less is not mentioned


def head_in_layers(model: ModelConfig, seq_length: int) -> float:
    """FLOPs of the head, prediction layers included, over those of a layer (the mean of all)."""
    next_token = model.model_copy(update={"num_nextn_predict_layers": 0})
    parts = flops_by_part(next_token, seq_length)
    layers = sum(parts.values())
    layers -= parts["head"]
    head = flops_per_token(model, seq_length) - layers
    return head * model.num_hidden_layers / layers


def step_time(layout: Layout, schedule: Schedule, head: float) -> float:
    """The sum over ticks of the slowest device's time; it and that of the `head` are in layers."""
    layers = (layout.table() >= 0).sum(-1)  # [pp, v]
    devices = np.arange(layout.pp)
    forward, backward = schedule.forward, schedule.backward
    forward_layers = layers[devices, forward.chunk] * forward.on
    backward_layers = layers[devices, backward.chunk] * backward.on
    time = (forward_layers + 2 * backward_layers) / 3
    is_last_chunk = forward.chunk[:, -1] == layout.v - 1
    time[:, -1] += head * forward.on[:, -1] * is_last_chunk
    return float(time.max(1).sum())


def candidates(cfg: Config) -> dict[str, Layout]:
    """Other layouts of as many stages, by the config key that asks for them.

    One counts the loss as a layer. The others have any number of layers in the last stage and the
    rest in equal stages.
    """
    now = layout_of(cfg)
    layers = len(now.kinds)
    stages = now.pp * now.v
    layouts = {}
    if layers + 1 >= stages:
        key = "mesh.pipeline_account_for=[loss]"
        layouts[key] = make_layout(now.kinds, now.pp, now.v, account_for=["loss"])
    if stages > 1:
        for last in range(layers - stages + 2):
            text = _layout_text(layers, stages, last)
            key = f"mesh.pipeline_layout='{text}'"
            layouts[key] = make_layout(now.kinds, now.pp, layout=text)
    return layouts


def _layout_text(layers: int, stages: int, last: int) -> str:
    """Megatron's string for `last` layers in the last stage and the rest in equal stages."""
    each, longer = divmod(layers - last, stages - 1)
    equal = [each + 1] * longer + [each] * (stages - 1 - longer)
    texts = [f"t*{size}" if size > 1 else "t" * size for size in (*equal, last)]
    return f"E{'|'.join(texts)}L"


def advice(cfg: Config, micro_batches: int) -> list[str]:
    """Lines on the cost of the head, and on the key that would make the step shorter, if any."""
    head = head_in_layers(cfg.model, cfg.data.seq_length)
    now = layout_of(cfg)
    schedule = make_schedule(now.pp, now.v, micro_batches)
    time = step_time(now, schedule, head)
    share = 1 - step_time(now, schedule, 0) / time
    cost = f"{head:.2f} layers of FLOPs on the last stage: {share:.1%} of the step"
    lines = [f"head        {cost}"]
    others = candidates(cfg).items()
    times = {key: step_time(layout, schedule, head) for key, layout in others}
    best = min(times.values(), default=time)
    if best < (1 - SMALLEST_GAIN) * time:
        good_enough = best + SMALLEST_GAIN * time
        # The simplest key comes first.
        key = next(key for key in times if times[key] <= good_enough)
        ratio = times[key] / time
        lines.append(f"            {key} would take {ratio:.1%} of that (estimate)")
    return lines
