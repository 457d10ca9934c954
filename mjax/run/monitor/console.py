"""The console lines of a run: one record in at most 100 columns.

Invariant: a line of training never wraps in a terminal of 100 columns, and all lines of a run have
one separator. Unknown figures are left out. `metrics.jsonl` has every figure in full.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

COLUMNS = 100
LEGEND = (
    "lines: loss, gradient norm, learning rate, time a step, tok/s and MFU a device, peak memory"
)
# A line of usual figures after its step, each at its widest: it decides the separator of a run.
USUAL = (
    "loss 2.5000", "norm 0.250", "lr 3.1e-4", "1234 ms", "39.8k tok/s", "MFU 47.3%", "139 GB",
    "ETA 39m54s",
)  # fmt: skip
OPTIONAL = ("memory", "rate", "lr")  # left out in this order where even the last does not
SHOWN_WAIT = 0.1  # share of the time above which waiting for data is worth a place

Known = float | int | str | None


class Console:
    """Makes the lines of records of a run that ends at `last_step`."""

    def __init__(self, last_step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._last_step, self._clock = last_step, clock
        self._seen: deque[tuple[int, float]] = deque(maxlen=100)
        usual = "  ".join((self._step(last_step), *USUAL))
        self._separator = "  " if len(usual) <= COLUMNS else " "

    def line(self, record: Mapping[str, Known]) -> str:
        """A record of training or of an evaluation as one line."""
        step = self._step(record["step"])
        if "eval_loss" in record:
            loss = _fixed(record["eval_loss"])
            fields = [step, f"held-out loss {loss}", f"{record['eval_tokens']:,} tokens"]
            return self._joined([*fields, *_further(record)])
        figures = _figures(record) | {"eta": self._time_left(record["step"])}
        known = {name: text for name, text in figures.items() if text is not None}
        return self._fit({"step": step, **known})

    def _step(self, step: int) -> str:
        return f"step {step:>{len(str(self._last_step))}}/{self._last_step}"

    def _time_left(self, step: int) -> str | None:
        """The time that the steps left will take, as the last records did, saving included."""
        now = self._clock()
        self._seen.append((step, now))
        first, began = self._seen[0]
        if step <= first or step >= self._last_step:
            return None
        return f"ETA {duration((self._last_step - step) * (now - began) / (step - first))}"

    def _fit(self, fields: dict[str, str]) -> str:
        """The fields in one line of at most `COLUMNS` columns."""
        for least in OPTIONAL:
            if len(self._separator.join(fields.values())) <= COLUMNS:
                break
            fields = {name: text for name, text in fields.items() if name != least}
        return self._joined(list(fields.values()))

    def _joined(self, texts: list[str]) -> str:
        """A line of the first texts, as many as fit whole: half a name or number would mislead."""
        while len(line := self._separator.join(texts)) > COLUMNS:
            texts.pop()
        return line


def _further(record: Mapping[str, Known]) -> list[str]:
    """The texts of what an evaluation measured besides the loss."""
    known = "eval_loss", "eval_tokens"
    names = [name for name in record if name.startswith("eval_") and name not in known]
    return [f"{name.removeprefix('eval_')} {_fixed(record[name])}" for name in names]


def _figures(record: Mapping[str, Known]) -> dict[str, str | None]:
    """The texts of a record's figures, in the order of the line; None: not known."""

    def show(name: str, form: Callable[[float], str]) -> str | None:
        value = record.get(name)
        return None if value is None else form(value)

    rate = show("mfu", lambda share: f"MFU {100 * share:.1f}%")
    waited = record.get("data_wait")
    is_waiting = waited is not None and waited >= SHOWN_WAIT
    return {
        "loss": f"loss {_fixed(record['loss'])}",
        "reward": show("reward", lambda mean: f"reward {_short(mean)}"),
        "norm": f"norm {_short(record['grad_norm'])}",
        "lr": f"lr {_short(record['lr'], 2)}",
        "time": show("ms_per_step", _step_time),
        "tokens": show("tokens_per_second", lambda count: f"{_prefixed(count)} tok/s"),
        "rate": rate or show("tflops", lambda count: f"{_prefixed(1e12 * count, ' ')}FLOP/s"),
        "memory": show("memory_gb", _size),
        "wait": f"data {100 * waited:.0f}%" if is_waiting else None,
    }


def _fixed(value: float | None) -> str:
    """A loss: four decimals as far as they mean something."""
    if value is None:
        return "none"
    return f"{value:.4f}" if abs(value) < 100 else _short(value)


def _short(value: float, digits: int = 3) -> str:
    """So many digits: 0.250, 17.3, 3e-4, 1.23e5."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 0.01 <= abs(value) < 10**digits - 0.5:
        return f"{value:#.{digits}g}".rstrip(".")
    number, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{number.rstrip('0').rstrip('.')}e{int(exponent)}"


def _step_time(milliseconds: float) -> str:
    if milliseconds >= 9999.5:
        return f"{_short(milliseconds / 1000)} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 99.95 else f"{milliseconds:.3g} ms"


def _size(gigabytes: float) -> str:
    return f"{gigabytes:.0f} GB" if gigabytes >= 9.95 else f"{gigabytes:.2g} GB"


def _prefixed(value: float, space: str = "") -> str:
    """A number in four letters or less and its prefix: 9087, 34.4k."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < (999.5 if prefix else 9999.5):
            break
        value /= 1000
    digits = f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
    return f"{digits}{space}{prefix}"


def duration(seconds: float) -> str:
    """A time span in its two largest units: 12d, 3d04h, 5h07m, 12m30s, 8s."""
    seconds = round(seconds)
    if seconds >= 10 * 86400:
        return f"{seconds // 86400}d"
    units = (86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")
    for size, unit, part, small in units:
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // part:02}{small}"
    return f"{seconds}s"
