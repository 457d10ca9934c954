"""Attention to pages, compiled for an H200: pages are written in place, and read where they lie."""

import re

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from mjax.kernels.attention.paged import (
    PagedRows,
    paged_attention,
    places_of_tokens,
    tokens_of_rows,
    write_pages,
)
from mjax.kernels.base.attention_call import AttentionCall
from mjax.kernels.base.chooser import believed
from mjax.plan.absent_devices import compiler_devices, compiler_told
from tests.aot.common import H200, missing
from tests.devices import HOPPER
from tests.marks import quick

pytestmark = pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))

PAGES, TABLE, HEADS = 4096, 128, 32
PLAIN = AttentionCall(scale=0.1)
ALL = AttentionCall(scale=0.1, window=1000, softcap=30.0)
# tokens, new ones of each row, kv heads, width, dtype of the cache, call
CASES = {
    "decode": (64, 1, 8, 128, "bfloat16", PLAIN),
    "ragged": (2048, None, 8, 128, "bfloat16", PLAIN),
    "decode, 8 bits, all": (64, 1, 8, 128, "float8_e4m3fn", ALL),
    "ragged, 8 bits, all": (2048, None, 8, 128, "float8_e4m3fn", ALL),
    "decode, 8 bits, width 16": (64, 1, 8, 16, "float8_e4m3fn", PLAIN),
    "latent": (64, 1, 1, 576, "bfloat16", PLAIN),
    "ragged, latent": (512, None, 1, 576, "bfloat16", PLAIN),
    "drafts of 7 heads, width 256": (96, 3, 4, 256, "bfloat16", PLAIN),
    "ragged, width 64": (512, None, 8, 64, "bfloat16", ALL),
}


@pytest.mark.parametrize("name", quick(CASES, 0))
def test_pages_are_not_copied(name):
    tokens, each, kv_heads, width, cache, call = CASES[name]
    count = 16 if each is None else tokens // each
    heads = 28 if "7 heads" in name else HEADS
    sharding = SingleDeviceSharding(compiler_devices(H200, 1)[0])

    def array(shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    pages = [array((PAGES, kv_heads, 64, width), cache)] * (1 if "latent" in name else 2)
    scales = [array((PAGES, kv_heads, 64), "float32")] * 2 if "8 bits" in name else None
    rows = [array((count, TABLE), "int32"), array((count,), "int32"), array((count + 1,), "int32")]
    new = [array((tokens, kv_heads, width))] * len(pages)
    sinks = array((heads,)) if call is ALL else None

    def step(pages, q, new, scales, rows, sinks):
        rows = PagedRows(*rows)
        places = places_of_tokens(rows, *tokens_of_rows(rows, tokens), 64)
        pages = [write_pages(p, n, *places) for p, n in zip(pages, new, strict=True)]
        more = {"sinks": sinks, "scales": scales, "each": each}
        if len(pages) == 1:
            more["value_size"] = 512
        return paged_attention(q, pages[0], (*pages, None)[1], rows, call, **more), pages

    with believed(HOPPER), compiler_told(H200.details.capability):
        arguments = pages, array((tokens, heads, width)), new, scales, rows, sinks
        made = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    kernels = ["attend_to_pages", *(["merge_splits"] if each else [])]
    text, memory = made.as_text(), made.memory_analysis()
    assert re.findall(r"custom-call\(.*/(\w+)/triton_kernel_call", text) == kernels
    size = sum(p.size * p.dtype.itemsize for p in pages)
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 2, "no copy of pages"
