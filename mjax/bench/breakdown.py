"""A step's time by part of the model: the kernels of a profile, sorted by the part they serve.

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

_COLLECTIVE_OPCODE = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
)
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
class KernelEvent:
    """A kernel or copy on a device: start and duration in ns, its name, its HLO instruction."""

    start: float
    duration: float
    kernel: str
    op: str = ""


@dataclass(frozen=True)
class Instruction:
    """An instruction of the compiled program; `opcodes` are those of the fusion it calls."""

    opcode: str
    path: str
    target: str
    opcodes: frozenset[str]


def profile(run: Callable[[], object]) -> tuple[list[KernelEvent], str]:
    """The first local device's events while `run()` works, and the text of the program that most
    of them belong to. Both are empty where the profiler sees no device (CPUs, no CUPTI)."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        events, module = _read_plane(files[0]) if files else ([], "")
    return events, program_text(module)


def _read_plane(path: Path) -> tuple[list[KernelEvent], str]:
    """Events of the first device plane, in order, and the commonest module among them."""
    events, modules = [], defaultdict(float)
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    planes = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for line in min(planes, key=lambda p: p.name).lines if planes else ():
        if not line.name.startswith("Stream"):
            continue  # lines that tools derive from the streams
        for e in line.events:
            stats = dict(e.stats)
            events.append(
                KernelEvent(e.start_ns, e.duration_ns, e.name, str(stats.get("hlo_op", "")))
            )
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


def classify(event: KernelEvent, program: dict[str, Instruction]) -> tuple[str, str]:
    """(part of PARTS, 'forward', 'recompute' or 'backward')."""
    made = _instruction(event, program)
    scopes, _, _ = made.path.rpartition("/")
    known = [word for word in re.findall(r"\w+", scopes) if word in _SCOPES]
    scope = known[-1] if known else ""
    backward = "transpose(" in scopes or made.target.endswith("Backward")
    recompute = "rematted_computation" in scopes
    phase = "recompute" if recompute else "backward" if backward else "forward"
    moves = "nccl" in event.kernel.lower() or "MemcpyP2P" in event.kernel  # copies are tp's
    if made.opcode.startswith(_COLLECTIVE_OPCODE) or moves:
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


def _instruction(event: KernelEvent, program: dict[str, Instruction]) -> Instruction:
    """The event's instruction; inside a CUDA graph, XLA's own kernels have its name instead."""
    none = Instruction("", "", "", frozenset())
    return program.get(event.op) or program.get(event.kernel, none)


def breakdown(events: Sequence[KernelEvent], hlo_text: str, steps: int = 1) -> list[dict]:
    """Rows {part, forward, recompute, backward, ms, share} of one of `steps` profiled steps.

    `hlo_text` is the program whose instructions `Event.op` names. The last row is communication
    that was hidden under kernels: it is in no sum.
    """
    times, busy, talk = _times_of_parts(events, parse(hlo_text))
    last = max(e.start + e.duration for e in events)
    wall = last - min(e.start for e in events)
    exposed = _union(busy + talk) - _union(busy)
    hidden = _union(talk) - exposed
    times[_EXPOSED][""] = exposed
    times[_GAPS][""] = wall - _union(busy + talk)
    rows = []
    for part in PARTS:
        total = sum(times[part].values())
        if not total and part not in (_EXPOSED, _GAPS):
            continue
        row: dict = {"part": part}
        for phase in _PHASES:
            row[phase] = round(times[part].get(phase, 0.0) / steps / 1e6, 4)
        row["ms"] = round(total / steps / 1e6, 4)
        row["share"] = round(total / wall, 4)
        rows.append(row)
    ms = round(hidden / steps / 1e6, 4)
    share = round(hidden / wall, 4)
    rows.append({"part": _HIDDEN, "ms": ms, "share": share})
    return rows


TimeSpan = tuple[float, float]  # start and end


def _times_of_parts(
    events: Sequence[KernelEvent], program: dict[str, Instruction]
) -> tuple[dict[str, dict[str, float]], list[TimeSpan], list[TimeSpan]]:
    """(part -> phase -> time, spans of kernels, spans of communication)."""
    times: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    busy: list[TimeSpan] = []
    talk: list[TimeSpan] = []
    upto = float("-inf")
    for event in sorted(events, key=lambda e: e.start):
        part, phase = classify(event, program)
        end = event.start + event.duration
        if part == _EXPOSED:
            talk.append((event.start, end))
            continue
        busy.append((event.start, end))
        begin = max(event.start, upto)
        times[part][phase] += max(0.0, end - begin)
        upto = max(upto, end)
    return times, busy, talk


_PHASES = "forward", "recompute", "backward"


def top(events: Sequence[KernelEvent], hlo_text: str, steps: int, count: int) -> list[dict]:
    """Rows of the `count` instructions that take longest, those of equal origin (unrolled
    layers) together: {op, ms, kernels, part, phase, path, kernel}, the last the longest one."""
    program = parse(hlo_text)
    groups: dict[tuple[str, ...], list[KernelEvent]] = defaultdict(list)
    for event in events:
        name = event.op if event.op in program else event.kernel
        op = re.sub(r"[._]\d+$", "", name)
        scopes = _instruction(event, program).path.split("/")
        path = "/".join(scopes[-3:])
        groups[op, path, *classify(event, program)].append(event)
    rows = []
    for (op, path, part, phase), own in groups.items():
        duration = sum(e.duration for e in own)
        longest = max(own, key=lambda e: e.duration)
        row = {
            "op": op[:40],
            "ms": round(duration / steps / 1e6, 4),
            "kernels": round(len(own) / steps),
            "part": part,
            "phase": phase,
            "path": path,
            "kernel": longest.kernel[:40],
        }
        rows.append(row)
    rows.sort(key=lambda row: -row["ms"])
    return rows[:count]


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, upto = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, upto))
        upto = max(upto, end)
    return total
