"""The figures of a phase of rollouts for the log, with TRL's names where it has them."""

from collections.abc import Mapping, Sequence

import numpy as np

from mjax.data.base.tokenizer import Tokenizer
from mjax.post.rollouts.transcript import Transcript

PhaseFigures = dict[str, float]
_SHOWN = 300  # characters of a transcript in the log


def reward_figures(groups: Sequence[Sequence[Transcript]], most: int, step: int) -> PhaseFigures:
    """Rewards, lengths and ages of groups that a step is trained on.

    most: tokens of the longest answer. step: updates of the weights before this one.
    """
    transcripts = [t for group in groups for t in group]
    rewards = np.array([[t.reward for t in group] for group in groups])
    lengths = np.array([t.length for t in transcripts])
    ages = np.concatenate([step - t.versions[t.is_sampled] for t in transcripts])
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(1).mean()),
        "frac_reward_zero_std": float((np.ptp(rewards, 1) == 0).mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": int(lengths.max()),
        "completions/clipped_ratio": float((lengths >= most).mean()),
        "staleness": float(ages.mean()) if len(ages) else 0.0,
        "staleness_max": int(ages.max(initial=0)),
        **environment_figures(transcripts),
    }


def environment_figures(transcripts: Sequence[Transcript]) -> PhaseFigures:
    """The means of what the environment measured, over the transcripts that have it."""
    values: dict[str, list[float]] = {}
    for transcript in transcripts:
        for name, value in transcript.metrics.items():
            values.setdefault(f"environment/{name}", []).append(float(value))
    return {name: float(np.mean(found)) for name, found in sorted(values.items())}


def time_figures(seconds: Mapping[str, float]) -> PhaseFigures:
    """Seconds of the parts of a step, and the share of the rollouts.

    With "waiting" among them rollouts were drawn beside the rest, and the share is that of waiting.
    """
    found = {f"seconds/{name}": value for name, value in seconds.items()}
    whole, share = sum(seconds.values()), seconds["rollout"]
    if "waiting" in seconds:
        whole, share = whole - share - seconds.get("rewards", 0.0), seconds["waiting"]
    return found | {"rollout_share": share / whole if whole else 0.0}


def transcript_line(transcript: Transcript, tokenizer: Tokenizer) -> str:
    """A transcript as a line of the log: the prompt, and what followed it."""
    begin = int(np.argmax(transcript.is_sampled))
    prompt, text = (tokenizer.decode(ids.tolist()) for ids in np.split(transcript.ids, [begin]))
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]} .."
    why = f", {transcript.reason}" if transcript.reason else ""
    return f"rollout: {prompt[-_SHOWN:]!r} -> {text!r} (reward {transcript.reward:g}{why})"
