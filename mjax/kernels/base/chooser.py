"""THE rule by which each op gets its implementation: by dtype, shape and device, and why.

`choose` is the only function that decides. Kernels ask it when they are traced, and `--dry-run`
prints its answers. Limits were measured on an H200 (docs/lab). Names: xla is plain JAX; triton is
our kernel in Triton; mosaic are our kernels for Hopper, in Pallas; cudnn and te are NVIDIA's.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjax.kernels.base.attention_call import AttentionCall, implementation_in_8_bits
from mjax.kernels.base.device_facts import has_triton, on_blackwell, on_hopper, rounded_memory

HEAD_SIZES = (64, 128, 256)  # of mosaic attention
PAGED_HEADS = 16, 256  # paged attention: what sizes of heads are multiples of, and the largest
LATENT_HEADS = 576, 512  # its keys and values where these are a part of keys
PAGES = (32, 64, 128, 256)  # tokens of a page: tiles of keys divide it
SHORT_HEAD = 64  # of our attention of short rows
SHORT_ROWS = {"full": 512, "causal": 1024}  # tokens of a row up to which it is faster than cuDNN
# Bytes: cuDNN's backward keeps a gradient of all queries of a row for each document. Beyond the
SPARED_SCRATCH, MOST_SCRATCH = 2**30, 2**32  # first ours takes over, or XLA's beyond the second.
SCRATCH_SHARE = 0.25  # of a device's memory: above it XLA's attention, though it is far slower
QUERY_CHUNK = 1024  # queries whose scores XLA's attention holds at a time
GATES = ("silu", "gelu_tanh", "gelu", "quick_gelu")
FEWEST = {  # elements of the widest input: with less, nothing is won
    "norm": 2**20,
    "gate": 2**20,
    "quantize": 2**20,
    "loss_rows": 2**24,
    "causal_conv": 2**20,
    "activated_matmul": 2**24,  # of the output
}
MOST_ELEMENTS = 2**31 - 1  # elements that a 32-bit offset reaches
WIDEST = {"rmsnorm": 4096, "layernorm": 16384}  # columns of a norm; beyond, XLA is faster
ALIGNED = 128  # columns of logits: wide loads need it, a padded vocabulary has it
CONV_TAPS = 4  # of our causal convolution: it holds as many tokens in registers
SSD_CHANNELS = 64  # of a head that a program of the scan takes
SSD_STATES = (64, 128)  # a larger one does not fit the registers
DELTA_CHUNK = 64  # tokens whose systems our kernel solves
DELTA_CHANNELS = 64  # of a head's values that a program takes
DELTA_KEYS = (64, 128)  # a larger state does not fit the registers
STATE_SIDES = 16, 32, 64, 128, 256, 512  # of a state that a token changes where it lies
ACTIVATED_SIDES = 64, 256  # what D and F are multiples of, of a matmul with an activation function
GROUPED_SIDES, GROUPED_ROWS = 64, 8  # what sizes of a grouped matmul are multiples of
GROUPED_8_BITS = 128  # the same for operands of 8 bits, rows too
KERNEL_SIDE = 128  # of the blocks that our Hopper kernels round and multiply
CHANNELS_ROWS, CHANNELS_INPUTS = 64, 128  # most rows of 8-bit weights' kernel; a tile of inputs
EIGHT_BITS = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
NO_FORKS = "our kernel starts no document from the state of a prefix (data.shared_prefixes)"
NO_GPU = "there is no GPU"
NO_TRITON = "jax-triton is not installed (pip install 'mjax[cuda13]')"


@dataclass(frozen=True)
class Device:
    """backend: jax's name of it, cpu or gpu. hopper: whether Mosaic kernels run on it. triton:
    whether triton and jax-triton are installed. blackwell: whether it multiplies scaled blocks.
    memory: bytes that JAX may use, a power of two (`rounded_memory`); None: not known."""

    backend: str
    hopper: bool = False
    triton: bool = True
    blackwell: bool = False
    memory: int | None = None


class Choice(NamedTuple):
    """The name of an implementation, and why it was chosen."""

    name: str
    why: str


class Inputs(NamedTuple):
    """The facts of an op's widest input that rules read: its dtype, shape and device."""

    dtype: jnp.dtype
    shape: tuple[int, ...]
    device: Device


_BELIEVED: ContextVar[Device | None] = ContextVar("believed", default=None)


def this_device() -> Device:
    """The default device, or the one that `believed` names."""
    return _BELIEVED.get() or Device(
        jax.default_backend(),
        on_hopper(),
        has_triton(),
        on_blackwell(),
        rounded_memory((jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")),
    )


@contextlib.contextmanager
def believed(device: Device) -> Iterator[None]:
    """Choose as if the default device were this one, which need not exist."""
    token = _BELIEVED.set(device)
    try:
        yield
    finally:
        _BELIEVED.reset(token)


def choose(
    op: str, dtype: jnp.dtype, shape: tuple[int, ...], device: Device | None = None, **facts
) -> Choice:
    """The implementation of `op` for its widest input, of `dtype` and `shape`.

    `device` is the default one unless given. `facts` are the keyword arguments of the op's rule.
    """
    return Choice(*RULES[op](Inputs(jnp.dtype(dtype), shape, device or this_device()), **facts))


def _attention(
    x: Inputs,
    *,
    call: AttentionCall,
    sinks: bool = False,
    value_size: int | None = None,
    relative: bool = False,
    by_blocks: bool = False,
) -> Choice:
    """The kernel for queries [B, S, N, H].

    value_size: the size of value heads if it is not H.
    relative: whether scores have biases by distance.
    by_blocks: whether keys may come in blocks.
    """
    if call.implementation != "auto":
        return Choice(call.implementation, "train.attention asks for it")
    if x.device.backend == "cpu":
        return Choice("xla", NO_GPU)
    if call.shared:
        if sinks or relative or (call.window, call.softcap) != (None, None):
            return Choice("xla", "cuDNN has no windows, soft-caps and sinks with shared prefixes")
        return Choice("cudnn", "two of its calls, to own and to shared keys, merge")
    has_several = call.max_documents != 1 and not call.padded
    sizes = x.shape[-1], value_size or x.shape[-1]
    more = {"sinks": sinks, "relative": relative}
    row = 3 * math.prod(x.shape[1:])  # where one array holds queries, keys and values
    lacks = short_attention_lacks(x.dtype, *sizes, call, x.device, row=row, **more)
    if call.window is not None and call.mask == "full":
        if lacks or by_blocks:
            return Choice("xla", "no fused kernel has such windows to both sides; XLA takes blocks")
        return Choice("triton", "it takes the keys of windows to both sides only")
    is_short = x.shape[1] <= SHORT_ROWS.get(call.mask, 0)
    if is_short and not (has_several or by_blocks or lacks):
        return Choice("triton", f"its tiles fill rows of {x.shape[1]} tokens better than cuDNN's")
    if relative and (has_several or call.deterministic):
        where = "in a fixed order" if call.deterministic else "among several documents"
        return Choice("xla", f"no fused kernel of ours adds biases by distance {where}")
    if call.mask == "cross" and has_several:
        return Choice("xla", "no fused kernel of ours has segments of cross-attention")
    ours = not mosaic_attention_lacks(x.dtype, *sizes, call, x.device)
    if ours and (call.softcap is not None or sinks):
        return Choice("mosaic", "cuDNN lacks soft-caps and sinks")
    scratch = 4 * math.prod(x.shape[:3]) * (x.shape[3] + 1) * call.max_documents
    why = f"cuDNN's backward would take {scratch / 1e9:.0f} GB for {call.max_documents} documents"
    share = math.inf if x.device.memory is None else SCRATCH_SHARE * x.device.memory
    if has_several and scratch > min(SPARED_SCRATCH if ours else MOST_SCRATCH, share):
        if ours:
            return Choice("mosaic", why)
        fits = scratch <= share
        by_chunks = not fits and x.shape[1] % QUERY_CHUNK == 0
        held = QUERY_CHUNK if by_chunks else x.shape[1]
        if held < x.shape[3] * call.max_documents:  # a head's scores take less
            return Choice("xla", why if fits else f"{why}, and a device has little more")
    if value_size not in (None, x.shape[-1]):
        heads = f"heads of {x.shape[-1]} and values of {value_size}"
        return Choice("cudnn", f"it takes {heads} as they are (padded, in packed documents)")
    return Choice("cudnn", "whole steps are no faster with mosaic")


def mosaic_attention_lacks(
    dtype: jnp.dtype, size: int, value_size: int, call: AttentionCall, device: Device
) -> str | None:
    """Why our Hopper attention cannot compute a call with heads of these sizes, or None."""
    if not device.hopper:
        return "it needs a Hopper GPU and jax >= 0.11"
    if call.dropout > 0:
        return "it has no model.attention.attention_dropout"
    if call.mask != "causal":
        return f"it has causal masks only, no {call.mask} mask"
    if call.shared:
        return "it has no shared prefixes"
    if dtype != jnp.bfloat16:
        return f"it computes bfloat16, not precision.compute={dtype}"
    if size not in HEAD_SIZES:
        return f"it has heads of {HEAD_SIZES}, not model.attention.head_dim={size}"
    if value_size != size:
        return f"it has no value heads of size {value_size} beside queries of {size}"
    return None


def short_attention_lacks(
    dtype: jnp.dtype,
    size: int,
    value_size: int,
    call: AttentionCall,
    device: Device,
    *,
    row: int,
    sinks: bool = False,
    relative: bool = False,
) -> str | None:
    """Why our attention of short rows cannot compute a call with heads of these sizes, or None.

    `row` is the number of elements of a row of its largest array.
    """
    if device.backend != "gpu":
        return NO_GPU
    if not device.triton:
        return NO_TRITON
    if call.dropout > 0:
        return "it has no model.attention.attention_dropout"
    if call.softcap is not None or sinks or relative:
        return "it has no soft-caps, sinks and biases by distance"
    if call.mask == "prefix" or call.shared:
        return "it has no prefix mask and no shared prefixes"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes bfloat16 and float16, not precision.compute={dtype}"
    if (size, value_size) != (SHORT_HEAD, SHORT_HEAD):
        return f"it has heads of {SHORT_HEAD}, not model.attention.head_dim={size}"
    if row > MOST_ELEMENTS:
        return f"its 32-bit offsets do not reach all of a row's {row:,} elements"
    return None


def _grouped_matmul(x: Inputs, *, implementation: str = "auto") -> Choice:
    """The kernel for rows and weights of sizes (M, G, K, N)."""
    if implementation != "auto":
        return Choice(implementation, "it is asked for")
    if x.device.backend == "cpu":
        return Choice("xla", NO_GPU)
    return _mosaic_or("xla", x)


def _mosaic_or(other: str, x: Inputs) -> Choice:
    """Our Hopper grouped matmul, or the name of another where it cannot compute the sizes."""
    lacks = mosaic_grouped_lacks(*x)
    if lacks:
        return Choice(other, f"mosaic does not compute it: {lacks}")
    return Choice("mosaic", "it multiplies each row by its own expert's weights only")


def mosaic_grouped_lacks(dtype: jnp.dtype, shape: tuple[int, ...], device: Device) -> str | None:
    """Why our Hopper grouped matmul cannot compute sizes (M, G, K, N), or None."""
    m, _, *sides = shape
    if not device.hopper:
        return "it needs a Hopper GPU and jax >= 0.11"
    if dtype != jnp.bfloat16 and dtype not in EIGHT_BITS:
        return f"it computes bfloat16, not {dtype}"
    of_sides, of_rows = GROUPED_SIDES, GROUPED_ROWS
    if dtype in EIGHT_BITS:
        of_sides = of_rows = GROUPED_8_BITS
    if any(size % of_sides for size in sides):
        return f"a weight of {sides[0]} x {sides[1]} is no multiple of {of_sides} both ways"
    if m % of_rows:
        return f"{m} rows are no multiple of {of_rows}"
    return None


def _norm(x: Inputs, *, layernorm: bool = False) -> Choice:
    """The kernel for the backward of norms of rows x [..., D]."""
    widest = WIDEST["layernorm" if layernorm else "rmsnorm"]
    if x.shape[-1] > widest:
        return Choice("xla", f"it is faster beyond {widest} columns")
    return _elementwise("norm", x)


def _gate(x: Inputs, *, act: str = GATES[0], rows: int = 1) -> Choice:
    """The kernel for inputs [M, ...] of an activation function, taken by so many `rows`."""
    if act not in GATES:
        return Choice("xla", f"our kernel computes {', '.join(GATES)} only")
    if x.shape[0] % rows:
        return Choice("xla", f"our kernel takes {rows} rows at a time")
    return _elementwise("gate", x)


def _activated_matmul(x: Inputs, *, act: str, plain: bool = True) -> Choice:
    """The kernel for an MLP's first matmul with act, and its second with act', of sizes (M, D, F).

    plain: the block has a bias, no gate and no FP8.
    """
    m, *sides = x.shape
    if not plain:
        return Choice("xla", "our kernels take blocks with a bias, without a gate and FP8")
    if act not in GATES:
        return Choice("xla", f"our kernels compute {', '.join(GATES)} only")
    if x.dtype != jnp.bfloat16:
        return Choice("xla", f"our kernels take no {x.dtype}")
    if any(size % unit for size, unit in zip(sides, ACTIVATED_SIDES, strict=True)):
        return Choice("xla", f"{sides[0]} x {sides[1]} is no multiple of {ACTIVATED_SIDES}")
    if m % GROUPED_ROWS:
        return Choice("xla", f"{m} rows are no multiple of {GROUPED_ROWS}")
    if m * sides[1] < FEWEST["activated_matmul"]:
        return Choice("xla", "the tiles of a small product are too few")
    if not x.device.hopper:
        return Choice("xla", "it needs a Hopper GPU and jax >= 0.11")
    return Choice("mosaic", "the function needs no pass over memory, in layers that keep all")


def _quantize(x: Inputs, *, backend: str) -> Choice:
    """The kernel that rounds [M, N] and its transpose to 8 bits; backend: the matmuls' own."""
    if backend != "xla":
        return Choice(backend, "precision.fp8_backend asks for it")
    if x.shape[0] % 2:
        return Choice("xla", "our kernel takes 2 rows at a time")
    return _elementwise("quantize", x)


def _block_matmul(x: Inputs, *, side: int, emulates: bool, scaled: bool = False) -> Choice:
    """The kernels that round [M, K] in blocks, or multiply (M, K, N); scaled: MXFP8 or NVFP4."""
    if emulates:
        return Choice("xla", "precision.fp8_emulate asks for it")
    if scaled and x.device.blackwell:
        return Choice("cudnn", "tensor cores scale the blocks; XLA rounds them")
    if scaled:
        return Choice("xla", "tensor cores of Blackwell scale such blocks, no others")
    if not x.device.hopper:
        return Choice("xla", "our kernels need a Hopper GPU and jax >= 0.11")
    if not x.device.triton:
        return Choice("xla", NO_TRITON)
    if side != KERNEL_SIDE or any(size % side for size in x.shape[1:]):
        return Choice("xla", f"our kernels take whole blocks of {KERNEL_SIDE}, no others")
    return Choice("mosaic", "sums of 128 terms are scaled while others are multiplied")


def _elementwise(op: str, x: Inputs) -> Choice:
    """The rules that our kernels of one pass over their inputs have in common."""
    size = math.prod(x.shape)
    # In fp16 nothing is rounded to 8 bits (config/validate.py).
    if x.dtype not in (jnp.bfloat16, jnp.float32) and (x.dtype != jnp.float16 or op == "quantize"):
        return Choice("xla", f"our kernel takes no {x.dtype}")
    if size < FEWEST[op]:
        return Choice("xla", f"a launch costs more for less than {FEWEST[op]:,} elements")
    if size > MOST_ELEMENTS:
        return Choice("xla", "32-bit offsets do not reach all elements")
    return _on_gpu(x.device, "one pass over the inputs")


def _loss_rows(
    x: Inputs, *, tp: int, chunk: int | None = None, unknown: str | None = None
) -> Choice:
    """The kernel for logits [tokens, vocabulary] on each of `tp` devices, `chunk` at a time.

    `unknown` says why our kernel cannot run with the token function of the loss.
    """
    tokens, rows = x.shape
    if unknown is not None:
        return Choice("xla", unknown)
    if tp > 1:
        return Choice("xla", "tp cuts the vocabulary")
    if rows % ALIGNED:
        return Choice("xla", f"the vocabulary is no multiple of {ALIGNED}")
    if tokens * rows < FEWEST["loss_rows"]:
        return Choice("xla", f"nothing is won for less than {FEWEST['loss_rows']:,} logits")
    if 2 * (chunk or 1) * rows > MOST_ELEMENTS:  # up to whole parts, a chunk may nearly double
        return Choice("xla", "32-bit offsets do not reach all logits of a chunk")
    return _on_gpu(x.device, "one read of the logits")


def _on_gpu(device: Device, why: str) -> Choice:
    if device.backend != "gpu":
        return Choice("xla", NO_GPU)
    return Choice("triton", why) if device.triton else Choice("xla", NO_TRITON)


def _experts(
    x: Inputs, *, asked: str, has_capacity: bool = False, eight_bits: bool = False
) -> Choice:
    """The kernel that multiplies rows and weights of a device's experts, of sizes (M, E, D, F).

    F counts the width of one matrix; a gated expert has two, side by side. `eight_bits`: both are
    rounded to 8 bits.
    """
    if asked != "auto":
        return Choice(asked, "train.experts asks for it")
    if x.device.backend == "cpu":
        return Choice("xla", NO_GPU)
    if has_capacity:
        return Choice("batched", "capacity bounds the rows of an expert")
    if eight_bits:
        choice = _mosaic_or("xla", x._replace(dtype=EIGHT_BITS[0]))
        how = "in 8 bits" if choice.name == "mosaic" else "rounded to 8 bits, multiplied in 16"
        return Choice(choice.name, f"{choice.why}; {how}")
    return _mosaic_or("loop", x)


def _ssd(x: Inputs, *, state: int, forked: bool = False) -> Choice:
    """The kernel for Mamba-2's scan of x [B, S, H, P] with states [P, `state`].

    forked: whether documents may start from the state of a prefix; so in the next rules.
    """
    if forked:
        return Choice("xla", NO_FORKS)
    if x.dtype != jnp.bfloat16:
        return Choice("xla", f"our kernel takes no {x.dtype}")
    if x.shape[-1] % SSD_CHANNELS:
        return Choice("xla", f"heads of {x.shape[-1]} are no multiple of {SSD_CHANNELS} channels")
    if state not in SSD_STATES:
        return Choice("xla", f"our kernel takes states of {SSD_STATES}, not {state}")
    return _on_gpu(x.device, "a program walks the chunks of a head with its state")


def _gated_delta(x: Inputs, *, width: int, chunk: int, forked: bool = False) -> Choice:
    """The kernel for values [..., H, P] and keys of N = `width`, in chunks of so many tokens."""
    if forked:
        return Choice("xla", NO_FORKS)
    if x.dtype != jnp.bfloat16:
        return Choice("xla", f"our kernels take no {x.dtype}")
    if chunk != DELTA_CHUNK:
        return Choice("xla", f"our kernels solve chunks of {DELTA_CHUNK} tokens, not {chunk}")
    if x.shape[-1] % DELTA_CHANNELS:
        return Choice("xla", f"heads of {x.shape[-1]} are no multiple of {DELTA_CHANNELS} channels")
    if width not in DELTA_KEYS:
        return Choice("xla", f"our kernels take keys of {DELTA_KEYS}, not {width}")
    return _on_gpu(x.device, "a program walks the chunks of a head with its state")


def _token_step(x: Inputs) -> Choice:
    """The kernel for states [slots, H, P, N] of which a token of each row changes one."""
    if x.dtype != jnp.float32:
        return Choice("xla", f"our kernel takes no states of {x.dtype}")
    if any(size not in STATE_SIDES for size in x.shape[2:]):
        return Choice("xla", f"our kernel takes states with sides of {STATE_SIDES}")
    return _on_gpu(x.device, "states change where they lie")


def _everywhere(x: Inputs, *, why: str) -> Choice:
    """The kernel for any sizes, on any GPU."""
    return _on_gpu(x.device, why)


def _channels8(x: Inputs) -> Choice:
    """The kernel for rows and a weight in e4m3 of sizes (M, K, N)."""
    count, width, outputs = x.shape
    if count > CHANNELS_ROWS:
        return Choice("xla", f"cuBLASLt is faster with more than {CHANNELS_ROWS} rows")
    if width % CHANNELS_INPUTS or width * outputs > MOST_ELEMENTS:
        return Choice("xla", f"our kernel has no {width} inputs with {outputs} outputs")
    if not x.device.hopper:
        return Choice("xla", "our kernel is for Hopper")
    return _on_gpu(x.device, "it reads a weight once, at the speed of memory")


def _paged_attention(x: Inputs, *, call: AttentionCall, value_size: int, page: int) -> Choice:
    """The kernels for queries [T, N, H] and pages of `page` tokens with values of `value_size`."""
    sizes = x.shape[-1], value_size
    if call.implementation == "xla":
        return Choice("xla", "train.attention asks for it")
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return Choice("xla", f"our kernels take no {x.dtype}")
    fits = sizes[0] == value_size <= PAGED_HEADS[1] and value_size % PAGED_HEADS[0] == 0
    if sizes != LATENT_HEADS and not fits:
        return Choice("xla", f"our kernels have no keys of {sizes[0]} with values of {sizes[1]}")
    if page not in PAGES:
        return Choice("xla", f"our kernels take pages of {PAGES} tokens, not {page}")
    return _on_gpu(x.device, "pages are read where they lie")


def _causal_conv(x: Inputs, *, taps: int, forked: bool = False) -> Choice:
    """The kernel for x [B, S, ...] with any channels."""
    if forked:
        return Choice("xla", NO_FORKS)
    if taps != CONV_TAPS:
        return Choice("xla", f"our kernel has {CONV_TAPS} taps, not {taps}")
    return _elementwise("causal_conv", x)


RULES = {
    "activated_matmul": _activated_matmul,
    "adam_row": functools.partial(_everywhere, why="a row is updated where it lies"),
    "attention": _attention,
    "attention_in_8_bits": implementation_in_8_bits,
    "block_matmul": _block_matmul,
    "causal_conv": _causal_conv,
    "experts": _experts,
    "gated_delta": _gated_delta,
    "channels8": _channels8,
    "nf4": functools.partial(_everywhere, why="a magnitude is read once for its block"),
    "paged_attention": _paged_attention,
    "grouped_matmul": _grouped_matmul,
    "norm": _norm,
    "gate": _gate,
    "loss_rows": _loss_rows,
    "quantize": _quantize,
    "ssd": _ssd,
    "token_step": _token_step,
}
