"""Where a step's time goes: kernels of a profile, sorted by what part of the model they serve.

Each kernel carries the name of its HLO instruction; the compiled program's text says by what JAX
name scopes that came to be, and whether it is a matmul, a copy or a collective. Invariant: the rows
of `breakdown` but the last add up to the profiled wall time; a moment belongs to the kernel that
started first, else to communication ('exposed'), else to 'gaps'.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

# Scopes (jax.named_scope in models/ and train/) -> parts; innermost wins.
_SCOPES = {
    "sdpa": "attention",
    "attention": "RoPE, bias",
    "mlp": "activation",
    "norm": "norm",
    "head": "head and loss: rest",
    "embed": "embedding",
    "gather": "weights: cast, gather",
    "accumulate": "gradients: add up",
    "reduce": "gradients: reduce, norm",
    "optimizer": "optimizer",
}
_EXPOSED, _HIDDEN, _GAPS = "communication, exposed", "communication, hidden", "gaps"
PARTS = (
    "attention",
    "matmul",
    "head and loss: matmul",
    *list(_SCOPES.values())[1:],
    "copies and transposes",
    "residual, other",
    _EXPOSED,
    _GAPS,
)

_COLLECTIVE = "all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all"
_SDPA_KERNEL = re.compile(r"fmha|sdpa|flash|^attention_", re.I)
_MATMUL_KERNEL = re.compile(r"gemm|nvjet|xmma|cutlass|cublas|splitk|wgmma", re.I)
_COPY_KERNEL = re.compile(r"^mem(cpy|set)", re.I)
# CUDA graphs would hide which instruction a kernel belongs to.
XLA_OPTIONS = {
    "xla_enable_command_buffers_during_profiling": False,
    "xla_gpu_enable_command_buffer": "",
}
# Instructions that move data and compute nothing.
_MOVES = frozenset(
    "parameter constant copy copy-start copy-done transpose bitcast reshape slice dynamic-slice "
    "dynamic-update-slice concatenate pad broadcast tuple get-tuple-element iota reverse".split()
)


@dataclass(frozen=True)
class Event:
    """A kernel or copy on a device: start and duration in ns, its name, its HLO instruction."""

    start: float
    duration: float
    kernel: str
    op: str = ""


@dataclass(frozen=True)
class Instruction:
    """What the program says of an instruction; `opcodes` are those of the fusion it calls."""

    opcode: str
    path: str
    target: str
    opcodes: frozenset[str]


def profile(run: Callable[[], object]) -> tuple[list[Event], str]:
    """The first local device's events while `run()` works, and the text of the program that most
    of them belong to. Both are empty where the profiler sees no device (CPUs, no CUPTI)."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        events, module = _read(files[0]) if files else ([], "")
    return events, program_text(module)


def _read(path: Path) -> tuple[list[Event], str]:
    """Events of the first device plane, in order, and the commonest module among them."""
    events, modules = [], defaultdict(float)
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    planes = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for line in min(planes, key=lambda p: p.name).lines if planes else ():
        if not line.name.startswith("Stream"):
            continue  # lines that tools derive from the streams
        for e in line.events:
            stats = dict(e.stats)
            events.append(Event(e.start_ns, e.duration_ns, e.name, str(stats.get("hlo_op", ""))))
            modules[str(stats.get("hlo_module", ""))] += e.duration_ns
    modules.pop("", None)
    return sorted(events, key=lambda e: e.start), max(modules, key=modules.get, default="")


def program_text(module: str) -> str:
    """Optimized HLO of the loaded program of that name; '' if there is none."""
    for executable in jax.local_devices()[0].client.live_executables():
        for m in executable.hlo_modules():
            if module and m.name.split(",")[0] == module:
                return m.to_string()
    return ""


def parse(hlo_text: str) -> dict[str, Instruction]:
    """Every instruction of a program's text, by name."""
    inside: dict[str, dict[str, tuple[str, str]]] = {}
    lines: list[tuple[str, str, str]] = []
    body: dict[str, tuple[str, str]] = {}
    for line in hlo_text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            body = inside.setdefault(header[1], {})
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(", line):
            name, kind, opcode = found.groups()
            index = re.match(r"(s32|u32|s64|pred)\[\]", kind)  # arithmetic on places, not data
            body[name] = ("parameter" if index else opcode), _path(line)
            lines.append((name, opcode, line))
    out = {}
    for name, opcode, line in lines:
        begun = re.search(r"\(%?([\w.\-]+)\)", line) if opcode.endswith("-done") else None
        if begun and begun[1] in out:
            out[name] = out[begun[1]]
            continue
        called = re.search(r"calls=%?([\w.\-]+)", line)
        within = inside.get(called[1], {}) if called else {}
        path = _path(line) or next((p for _, p in reversed(within.values()) if p), "")
        target = re.search(r'custom_call_target="([^"]*)"', line)
        gemm = {"dot"} if re.search(r'"kind":"__triton\w*gemm', line) else set()
        opcodes = frozenset({code for code, _ in within.values()} | gemm)
        out[name] = Instruction(opcode, path, target[1] if target else "", opcodes)
    return {name.replace(".", "_"): made for name, made in out.items()} | out


def _path(line: str) -> str:
    found = re.search(r'op_name="([^"]*)"', line)
    return found[1] if found else ""


def classify(event: Event, program: dict[str, Instruction]) -> tuple[str, str]:
    """(part of PARTS, 'forward', 'recompute' or 'backward')."""
    made = _instruction(event, program)
    scopes, _, _ = made.path.rpartition("/")
    known = [word for word in re.findall(r"\w+", scopes) if word in _SCOPES]
    scope = known[-1] if known else ""
    backward = "transpose(" in scopes or made.target.endswith("Backward")
    recompute = "rematted_computation" in scopes
    phase = "recompute" if recompute else "backward" if backward else "forward"
    moves = "nccl" in event.kernel.lower() or "MemcpyP2P" in event.kernel  # copies are tp's
    if made.opcode.startswith(_COLLECTIVE) or moves:
        return _EXPOSED, phase
    is_sdpa = made.target.startswith("__cudnn$fmha") or _SDPA_KERNEL.search(event.kernel)
    if scope == "sdpa" or is_sdpa:
        return "attention", phase
    by_name = not made.opcode and _MATMUL_KERNEL.search(event.kernel)
    called = re.search("cublas|mosaic_gpu", made.target)  # experts' matmuls are Mosaic's
    if by_name or made.opcode == "dot" or called or "dot" in made.opcodes:
        return "head and loss: matmul" if scope == "head" else "matmul", phase
    moves = made.opcode in _MOVES or (made.opcodes and made.opcodes <= _MOVES)
    if moves or _COPY_KERNEL.match(event.kernel):
        return "copies and transposes", phase
    return _SCOPES.get(scope, "residual, other"), phase


def _instruction(event: Event, program: dict[str, Instruction]) -> Instruction:
    """That of an event; where a CUDA graph hides it, XLA's own kernels are named after theirs."""
    none = Instruction("", "", "", frozenset())
    return program.get(event.op) or program.get(event.kernel, none)


def breakdown(events: Sequence[Event], hlo_text: str, steps: int = 1) -> list[dict]:
    """Rows {part, forward, recompute, backward, ms, share} of one of `steps` profiled steps.

    `hlo_text` is the program whose instructions `Event.op` names. The last row is communication
    that was hidden under kernels: it is in no sum.
    """
    program = parse(hlo_text)
    times: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    busy, talk, upto = [], [], float("-inf")
    for e in sorted(events, key=lambda e: e.start):
        part, phase = classify(e, program)
        span = e.start, e.start + e.duration
        (talk if part == _EXPOSED else busy).append(span)
        if part != _EXPOSED:
            times[part][phase] += max(0.0, span[1] - max(span[0], upto))
            upto = max(upto, span[1])
    wall = max(e.start + e.duration for e in events) - min(e.start for e in events)
    exposed = _union(busy + talk) - _union(busy)
    times[_EXPOSED][""], times[_GAPS][""] = exposed, wall - _union(busy + talk)
    rows = []
    for part in PARTS:
        phases = {p: times[part].get(p, 0.0) / steps / 1e6 for p in _PHASES}
        ms = sum(times[part].values()) / steps / 1e6
        if ms or part in (_EXPOSED, _GAPS):
            share = ms * 1e6 * steps / wall
            rows.append({"part": part, **phases, "ms": ms, "share": share})
    hidden = _union(talk) - exposed
    rows.append({"part": _HIDDEN, "ms": hidden / steps / 1e6, "share": hidden / wall})
    return [{k: v if k == "part" else round(v, 4) for k, v in row.items()} for row in rows]


_PHASES = "forward", "recompute", "backward"


def top(events: Sequence[Event], hlo_text: str, steps: int, count: int) -> list[dict]:
    """Rows of the `count` instructions that take longest, those of equal origin (unrolled
    layers) together: {op, ms, kernels, part, phase, path, kernel}, the last the longest one."""
    program = parse(hlo_text)
    groups: dict[tuple[str, ...], list[Event]] = defaultdict(list)
    for e in events:
        made = _instruction(e, program)
        op = re.sub(r"[._]\d+$", "", e.op if e.op in program else e.kernel)
        groups[op, "/".join(made.path.split("/")[-3:]), *classify(e, program)].append(e)
    rows = []
    for (op, path, part, phase), own in groups.items():
        ms = round(sum(e.duration for e in own) / steps / 1e6, 4)
        row = {"op": op[:40], "ms": ms, "kernels": round(len(own) / steps), "part": part}
        kernel = max(own, key=lambda e: e.duration).kernel[:40]
        rows.append(row | {"phase": phase, "path": path, "kernel": kernel})
    return sorted(rows, key=lambda row: -row["ms"])[:count]


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, upto = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, upto))
        upto = max(upto, end)
    return total
