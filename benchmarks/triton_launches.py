"""Both launches of Triton kernels on a GPU: the bits of each kernel, then times of decoding.

Usage: python -m benchmarks.triton_launches smoke | bits | time [LAYERS] | load

smoke: one kernel launched by XLA. bits: every call in the Triton tests of tests/gpu, both ways.
time: batches of 1 and 256, in bf16 and in 8 bits, both ways. load: the driver's compiler at the
first run, with a cold and a warm cache. Tables are printed; files go to the folder that the
variable OUT names, or to the current one.

For `bits` this file is a plugin of pytest, too. It runs each call both ways in one program, and
compares the outputs as integers. Parts that a kernel leaves unwritten may differ.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

OUT = Path(os.environ.get("OUT", "."))
COMPARES, PLUGIN = "MJAX_COMPARE_LAUNCHES", "benchmarks.triton_launches"
FILES = "norm gate loss adam ssd gated_delta paged channels8 nf4 block_matmul shared_prefix"
SEEN = defaultdict(lambda: [0, 0, 0, 0])  # calls, calls that differ, elements that differ, all


# ---- bits: the pytest plugin -------------------------------------------------------------------


def pytest_configure(config):
    if os.environ.get(COMPARES):
        os.environ["MJAX_TRITON_LAUNCH"] = "xla"
        watch()


def watch():
    import jax
    import jax.numpy as jnp

    from mjax.kernels.base import triton_call

    by_jax_triton, primitive = triton_call._by_jax_triton, triton_call._kernel_p
    integers = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}

    def bits(x):
        if x.dtype == jnp.bool_:
            return x
        return jax.lax.bitcast_convert_type(x, integers[x.dtype.itemsize])

    def both(*inputs, call):
        ours = primitive.bind(*inputs, call=call)
        # so that the calls neither merge nor run beside each other
        again, ours = jax.lax.optimization_barrier((list(inputs), list(ours)))
        theirs = by_jax_triton(again, call)
        counts = jnp.stack([jnp.sum(bits(a) != bits(b)) for a, b in zip(ours, theirs, strict=True)])
        sizes = [a.size for a in ours]

        def note(counts):
            row = SEEN[call.kernel.__name__]
            row[0] += 1
            row[1] += int(counts.sum() > 0)
            row[2] += int(counts.sum())
            row[3] += sum(sizes)

        jax.debug.callback(note, counts)
        return ours

    triton_call._kernel_p = SimpleNamespace(bind=both)


def pytest_sessionfinish(session):
    if not os.environ.get(COMPARES):
        return
    import jax

    jax.effects_barrier()
    names = "calls", "differ", "elements", "of"
    rows = {name: dict(zip(names, row, strict=True)) for name, row in SEEN.items()}
    (OUT / "triton_launch_bits.json").write_text(json.dumps(rows, indent=1))
    print("\nkernel                       calls  differ  elements of")
    for name, (calls, differ, elements, of) in sorted(SEEN.items()):
        print(f"{name:28} {calls:5} {differ:7}  {elements} of {of}")


def bits_command():
    env = os.environ | {COMPARES: "1"}
    files = [f"tests/gpu/test_{name}.py" for name in FILES.split()]
    files = [file for file in files if Path(file).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "", "-p", PLUGIN, *files]
    return subprocess.run(command, env=env).returncode


# ---- smoke -------------------------------------------------------------------------------------


def smoke():
    os.environ["MJAX_TRITON_LAUNCH"] = "xla"
    import jax
    import jax.numpy as jnp
    import numpy as np

    from mjax.kernels.fp8.channels import Channels8, ChannelTile, multiply_few, multiply_rounded

    x = jax.random.normal(jax.random.key(0), (2, 4096), jnp.bfloat16)
    w = Channels8.rounded(jax.random.normal(jax.random.key(1), (4096, 4096), jnp.bfloat16), 1)
    begin = time.perf_counter()
    y = jax.jit(lambda *a: multiply_few(*a, ChannelTile()))(x, w.values, w.scales)
    y.block_until_ready()
    print(f"first run {time.perf_counter() - begin:.2f} s")
    plain = jax.jit(multiply_rounded)(x, w.values, w.scales)
    error = np.abs(np.asarray(y, np.float32) - np.asarray(plain, np.float32)).max()
    print("largest difference from plain JAX", error, "of", float(jnp.abs(plain).max()))
    assert error < 0.02 * float(jnp.abs(plain).max())
    # above 48 KiB of shared memory
    tile = ChannelTile(stages=8)
    wide = jax.jit(lambda *a: multiply_few(*a, tile))(x, w.values, w.scales)
    assert (wide == y).all(), "another number of stages gave other bits"
    print("80 KiB of shared memory: fine")


# ---- time --------------------------------------------------------------------------------------


def engine(way, rows, eight, layers, new=200):
    name = f"{way}, {'w8c8' if eight else 'bf16'}, batch {rows}"
    command = [sys.executable, "-m", "mjax.bench", "engine"]
    command += ["--config", "configs/models/llama3_8b.yaml"]
    command += ["--requests", str(rows), "--rows", str(rows), "--prompt", "128", "--new", str(new)]
    command += ["--weight-dtype", "fp8", "--cache-dtype", "fp8"] if eight else []
    command += [f"model.num_hidden_layers={layers}"]
    begin = time.perf_counter()
    made = subprocess.run(
        command, env=os.environ | {"MJAX_TRITON_LAUNCH": way}, capture_output=True, text=True
    )
    wall = time.perf_counter() - begin
    lines = [line for line in made.stdout.splitlines() if line.startswith("{")]
    record = json.loads(lines[-1]) if lines else {"error": made.stderr[-1500:]}
    record |= {"case": name, "layers": layers, "wall_s": round(wall, 1), "rc": made.returncode}
    shown = "case", "wall_s", "rc", "ms", "between_ms", "error"
    print({key: record[key] for key in shown if key in record})
    with open(OUT / "triton_launch_times.json", "a") as file:
        file.write(json.dumps(record) + "\n")
    return record


def times(layers=8):
    found = defaultdict(list)
    for _ in range(2):  # the ways take turns: a host is never as idle twice
        for eight in (True, False):
            for rows in (1, 256):
                for way in ("jax-triton", "xla"):
                    record = engine(way, rows, eight, layers)
                    if "ms" in record:
                        found[record["case"]].append(record["ms"])
    for case, ms in found.items():
        print(f"{case:32} {statistics.median(ms):8.3f} ms a step {ms}")


# ---- load --------------------------------------------------------------------------------------


def load():
    """Seconds of a short run of 32 layers with the driver's cache cold, then warm; jax-triton."""
    cache = Path(os.environ.get("CUDA_CACHE_PATH", Path.home() / ".nv" / "ComputeCache"))
    shutil.rmtree(cache, ignore_errors=True)
    for way, what in (("xla", "cold"), ("xla", "warm"), ("jax-triton", "")):
        record = engine(way, 1, True, 32, new=8)
        size = sum(f.stat().st_size for f in cache.rglob("*") if f.is_file())
        print(way, what, record["wall_s"], f"s; driver's cache {size / 1e6:.1f} MB")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ("smoke", "bits", "time", "load"):
        sys.exit(__doc__)
    if sys.argv[1] == "time":
        times(*map(int, sys.argv[2:3]))
    else:
        sys.exit({"smoke": smoke, "bits": bits_command, "load": load}[sys.argv[1]]())
