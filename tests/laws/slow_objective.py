"""The default objective with a host that is slow: process 1 sleeps over every batch it reads."""

import time

import jax

from mjax.objectives.next_token import NextToken

SECONDS = 3.0  # far longer than a step, also on a busy machine


class SlowHost(NextToken):
    def make_fields(self, batch, seed, step, rows):
        if jax.process_index() == 1:
            time.sleep(SECONDS)
        return {}
