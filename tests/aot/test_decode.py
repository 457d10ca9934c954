"""A step of decoding, compiled for an H200, reads weights and caches where they lie."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mjax.config import load
from mjax.infer.caches.paged import PAGE
from mjax.infer.caches.specs import PoolSizes
from mjax.infer.programs import EnginePrograms, StepTokens, record_dtype
from mjax.infer.sample import Draws, RowRules
from mjax.models import definition_of
from mjax.plan.absent_devices import as_on, compiler_devices
from tests.aot.common import H200, missing, weights_apart
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

LAYERS, PAGES = 2, 260
MADE = re.compile(r"(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\(")
FREE = {"parameter", "bitcast", "tuple", "get-tuple-element", "while", "conditional"}


def compiled_step(batch, draws=None, **options):
    """A step of a batch of Llama-3-8B rows with two layers, in bf16, from lists of layers.

    Its layers, or what draws tokens; `options` of the compiler.
    """
    cfg = load("configs/models/llama3_8b.yaml", [f"model.num_hidden_layers={LAYERS}"]).model
    device = compiler_devices(H200, 1)[0]
    one = SingleDeviceSharding(device)

    def array(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=one)

    definition = definition_of(cfg)
    params = weights_apart(definition.specs, lambda spec: array(spec.shape))
    sizes = PoolSizes(PAGES, 64, 4)
    programs = EnginePrograms(definition, cfg, None, jnp.dtype("bfloat16"), sizes)
    state = jax.tree.map(lambda x: array(x.shape, x.dtype), jax.eval_shape(programs._empty))
    records = array((batch, record_dtype(sizes).itemsize // 4), jnp.int32)
    with as_on(H200):
        made = programs.forward.lower(params, state.caches, state.last, StepTokens(), records)
        if draws is not None:
            of_rows, logits = state._replace(caches=[]), array((batch, cfg.vocab_size), jnp.float32)
            own = logits, None, records, RowRules()
            made = programs.draw.lower(of_rows, *own, draws=draws)
        made = made.compile(compiler_options=options or None)
    return made, sum(2 * math.prod(c.shape) for c in jax.tree.leaves(state.caches)), cfg


@pytest.mark.parametrize("batch", [1, 64])
def test_nothing_of_the_size_of_a_weight_or_cache_is_made_but_caches_in_place(batch):
    made, cache_bytes, cfg = compiled_step(batch)
    cache = PAGES * cfg.attention.num_key_value_heads * PAGE * cfg.attention.head_dim
    smallest_weight = (
        2 * cfg.hidden_size * cfg.attention.num_key_value_heads * cfg.attention.head_dim
    )
    text = made.as_text()
    large = []
    for line in text[text.index("\nENTRY") :].splitlines():
        found = MADE.match(line.strip())
        if found is None or found[3] in FREE:
            continue
        shapes = re.findall(r"\w+\[([\d,]+)\]", found[2])
        size = max((math.prod(map(int, shape.split(","))) for shape in shapes), default=0)
        if size >= min(cache, smallest_weight):
            large.append((found[1].rsplit(".", 1)[0], size))
    writes = "scatter", "dynamic_update_slice"  # of several tokens, and of one
    updates = [n for n, size in large if size == cache and any(kind in n for kind in writes)]
    assert len(updates) == len(large) == 2 * LAYERS, large
    memory = made.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes, "caches must be donated"
    logits = 4 * batch * cfg.vocab_size
    assert memory.temp_size_in_bytes < 2 * logits + 8e6, "logits and activations; no more"


LIMITED = Draws(random=True, limited=True)


@pytest.mark.parametrize("draws", [None, Draws(), Draws(random=True)])
def test_the_host_waits_for_nothing_within_a_step(draws):
    made, _, _ = compiled_step(2, draws)
    lines = [x for x in made.as_text().splitlines() if '"known_trip_count"' not in x]
    waits = re.findall(r" (conditional|while|infeed|recv)\(", "\n".join(lines))
    assert not waits, "the host reads a predicate before it launches what follows"


@exhaustive
def test_limits_are_one_graph_whose_branches_the_device_takes(tmp_path):
    """Three passes over all logits, of which the last is two fusions: few, top-p's sum, results."""
    rows = 256
    made, _, cfg = compiled_step(rows, LIMITED, xla_dump_to=str(tmp_path))
    (file,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    launches = re.findall(r"^( *)\d+: (k\w+)", file.read_text(), re.M)
    assert [kind for indent, kind in launches if not indent] == ["kCommandBuffer"], launches
    assert [kind for _, kind in launches].count("kConditional") == 2
    text = made.as_text()
    entry = text[text.index("\nENTRY") :]
    logits = re.search(rf"%(\S+) = f32\[{rows},{cfg.vocab_size}\]\S* parameter", entry)[1]
    passes = re.findall(rf"%(input\S*reduce\S*) = .*\(.*%{re.escape(logits)}[,)]", entry)
    assert len(passes) <= 5, "and one of 512 blocks of logits in each row"
    assert made.memory_analysis().temp_size_in_bytes < 1.2 * 4 * rows * cfg.vocab_size


@pytest.mark.parametrize("batch", [1, 64])
def test_queries_keys_and_values_are_one_matmul(batch):
    made, _, cfg = compiled_step(batch)
    text = made.as_text()
    width = (
        cfg.attention.num_attention_heads + 2 * cfg.attention.num_key_value_heads
    ) * cfg.attention.head_dim
    line = rf"= \w+\[(?:\d+,)*{width}\]\S* fusion\(.*__triton_nested_gemm_fusion"
    assert len(re.findall(line, text[text.index("\nENTRY") :])) == LAYERS
