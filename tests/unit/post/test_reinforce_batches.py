"""What the engine of rollouts is sized by."""

from mjax.config.schema.reinforce import ReinforceConfig
from mjax.post.reinforce_batches import answers_at_once


def test_rows_that_are_asked_for_may_hold_all_open_answers():
    sizes = {"prompts_per_step": 6, "group_size": 2}
    assert answers_at_once(ReinforceConfig(**sizes, max_staleness=4)) == 12
    rows = sizes | {"engine": {"rows": 64}}
    assert answers_at_once(ReinforceConfig(**rows)) == 12
    assert answers_at_once(ReinforceConfig(**rows, max_staleness=4)) == 60
    assert answers_at_once(ReinforceConfig(**rows, max_staleness=4, updates_per_rollout=2)) == 36
