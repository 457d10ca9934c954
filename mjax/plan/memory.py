"""The one estimate of the memory that a training step needs, used by every `auto`.

Tensors kept for the backward are not estimated but read from the layer's own trace (`kept`), on the
local shapes of a mesh that need not exist. The rest are shards of the parameters and, for what the
compiler adds, factors measured on programs compiled for H200 (docs/train/memory.md). Invariant: a
pure function of (config, sizes of the mesh, declared parameters).
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp

from mjax.config.languages.pipeline_layout import EMPTY
from mjax.config.languages.remat import offloaded
from mjax.config.rules.distill_rules import mesh_of_teacher
from mjax.config.rules.mesh_rules import mesh_sizes
from mjax.config.schema.run import Config, MeshConfig, OptimizerConfig, PrecisionConfig
from mjax.kernels.loss.cross_entropy import cut_of
from mjax.kernels.loss.rows import fits
from mjax.models import definition_of
from mjax.models.base.branch import model_heads
from mjax.models.runtime.execution import Execution, is_matmul_weight
from mjax.models.runtime.remat import STASHED
from mjax.objectives.contrastive import LOGIT_ROWS
from mjax.objectives.objective import TeacherReader, objective_of
from mjax.optim.build import moment_bytes
from mjax.pipeline.layout import layout_of
from mjax.pipeline.schedule import make_schedule
from mjax.pipeline.storage import storage_specs
from mjax.plan.activations import Kept, kept
from mjax.plan.execution import decide_evaluation, decide_execution, micro_batch_shape
from mjax.sharding.mesh import parallel_of_run
from mjax.sharding.rules import ParamPlacement, place

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}

# Buffers of one layer's backward, in units of what that layer keeps under `dots`: measured.
WORK = 3.0


class HeldLayers(NamedTuple):
    """The layers that one device holds of one chunk.

    each: (kind, policy) of each. waiting: for how many micro-batches kept tensors wait at a time.
    chunks: of a device.
    """

    each: tuple[tuple[str, str], ...]
    waiting: int
    chunks: int


def held_layers(cfg: Config, sizes: dict[str, int]) -> HeldLayers:
    """The layers of a device under train.remat, where "auto" stands for dots."""
    execution = decide_execution(cfg, sizes)
    each = []
    for plan in execution.layers:
        kind = max(set(plan.kinds) - {EMPTY})
        each.append((kind, "none" if plan.remat == STASHED else plan.remat))
    if not execution.pipelined:
        return HeldLayers(tuple(each), 1, 1)
    layout = layout_of(cfg)
    schedule = make_schedule(layout.pp, layout.v, execution.micro_batches)
    return HeldLayers(tuple(each), schedule.slots, layout.v)


class Counts(NamedTuple):
    """Parameters on one device: tables (embedding, positions, head) and stacks of layers.

    eight_bits: of the stacks, those that matmuls can read in 8 bits. shard: of all, as ZeRO stores
    them. trained_of_role: of those of each role that are trained. trained_share: of the weights.
    whole_layer: of the largest layer. stored_stacks: of the stacks, as ZeRO stores them.
    expert_stack: of the largest stack of experts of several layers, likewise.
    held_bytes: of a base of adapters, which is in none of the other counts but whole_layer: it is
        read as it is stored. held_rows: the part of it that matmuls of layers read.
    """

    tables: float
    stacks: float
    eight_bits: float
    shard: float
    trained_of_role: dict[str, int]
    trained_share: float
    whole_layer: float
    stored_stacks: float
    expert_stack: float
    held_bytes: float
    held_rows: float


Traced = dict[tuple[str, str], list[Kept]]  # by kind of layer and policy


def bytes_per_device(
    cfg: Config, mesh: MeshConfig, devices: int, specs: dict, traced: Traced | None = None
) -> dict[str, float]:
    """Bytes that a training step of `cfg` on `mesh` needs at its peak, by what they are for.

    `specs` declare the parameters. `traced` is what layers keep, as far as it is known; what is
    found is added to it.
    """
    traced = {} if traced is None else traced
    sizes = mesh_sizes(mesh, devices)
    cfg = cfg.model_copy(update={"mesh": mesh})
    execution, layers = decide_execution(cfg, sizes), held_layers(cfg, sizes)
    with_dots = {(kind, "dots") for kind, _ in layers.each}
    predicting = {(kind, layers.each[-1][1]) for kind in cfg.model.prediction_kinds}
    for pair in {*layers.each, *with_dots, *predicting} - set(traced):
        traced[pair] = kept(cfg, sizes, *pair)
    work = WORK * max(sum(t.bytes for t in traced[pair]) for pair in with_dots)
    count = counts_on_device(cfg, sizes, specs)
    parts = ParameterBytes(cfg, sizes, execution, count, layers).by_life()
    loss = _loss_bytes(cfg, sizes) - parts["gradients of a micro-batch"]  # which come later
    parts["activations"] = _activation_bytes(cfg, sizes, execution, layers, traced)
    parts["work"] = max(work, loss)
    if cfg.train.objective == "preference" and cfg.preference.computes_reference:
        parts["reference"] = _reference_bytes(cfg, count)
    if cfg.train.objective == "policy" and cfg.reinforce.loss_type == "ppo":  # as the policy's
        parts["critic"] = parts["masters"] + parts["moments"]
    objective = objective_of(cfg)
    if isinstance(objective, TeacherReader):
        if not cfg.distill.teacher_mesh:  # its arrays take the places of the step's
            temporary = sum(parts.values()) - parts["masters"] - parts["moments"]
            forward = teacher_role(cfg, objective, devices)["forward pass"]
            parts["teacher's forward pass"] = max(0.0, forward - temporary)
        parts["teacher"] = teacher_bytes(cfg, sizes, objective)
    return parts


def teacher_bytes(cfg: Config, sizes: dict[str, int], objective: TeacherReader) -> float:
    """The bytes of a teacher on a device that trains.

    They are its head, its fields of two batches, which are placed ahead, and its shards unless it
    has devices of its own. A field is an array of its width for each token (`post/teacher.py`).
    """
    teacher, held = objective.teacher, 0.0
    if not cfg.distill.teacher_mesh:
        devices = math.prod(sizes.values())
        held = teacher_role(cfg, objective, devices)["weights"]
    fields = 2 * _tokens_of_batch(cfg, sizes) * _field_bytes(cfg, objective)
    words = teacher.padded_vocab_size / sizes["tp"]
    head = WIDTH[cfg.precision.compute] * words * teacher.hidden_size
    return held + fields + head


def own_teacher_bytes(cfg: Config, rows: int, objective: TeacherReader) -> dict[str, float]:
    """The bytes of a teacher on a device of its own, by what they are for.

    Its fields are there as it computes them, and cut for the devices that train, which divide the
    rows of a batch by `rows`.
    """
    count = cfg.distill.teacher_mesh["devices"]
    sizes = mesh_sizes(mesh_of_teacher(cfg), count)
    whole = cfg.train.global_batch_size * cfg.data.seq_length
    tokens = _tokens_of_batch(cfg, sizes) + 2 * whole / math.gcd(rows, count)
    fields = tokens * _field_bytes(cfg, objective)
    return teacher_role(cfg, objective, count) | {"fields": fields}


def _field_bytes(cfg: Config, objective: TeacherReader) -> int:
    """The bytes of the fields of a token that its teacher computes."""
    width = WIDTH[cfg.precision.compute] * objective.teacher.hidden_size
    return width * (1 + len(objective.outputs))


def _tokens_of_batch(cfg: Config, sizes: dict[str, int]) -> float:
    """The tokens of a global batch that a device has."""
    tokens = cfg.train.global_batch_size * cfg.data.seq_length
    return tokens / (sizes["dp"] * sizes["ep"] * sizes["cp"])


def teacher_role(cfg: Config, objective: TeacherReader, devices: int) -> dict[str, float]:
    """`_role_bytes` of a teacher on its mesh of so many devices."""
    own = {
        "model": objective.teacher,
        "mesh": mesh_of_teacher(cfg),
        "train": cfg.train.model_copy(update={"remat": "full"}),  # it has no backward
        "precision": PrecisionConfig(compute=cfg.precision.compute),
        "optimizer": OptimizerConfig(),
    }
    return _role_bytes(cfg.model_copy(update=own).model_dump_json(), devices)


@functools.lru_cache(maxsize=64)
def _role_bytes(run: str, devices: int) -> dict[str, float]:
    """The bytes of a frozen role on a device, its config being JSON here.

    They are its shards, and what its forward pass needs beside them, at most: what ZeRO gathers,
    the weights of a layer, which a loop takes from their stacks, all that the layer computes, its
    input and its output.
    """
    cfg = Config.model_validate_json(run)
    sizes = mesh_sizes(cfg.mesh, devices)
    layers, width = held_layers(cfg, sizes), WIDTH[cfg.precision.compute]
    count = counts_on_device(cfg, sizes, definition_of(cfg.model).specs)
    computed = []
    for kind, _ in set(layers.each):
        tensors = kept(cfg, sizes, kind, "none")
        computed.append(sum(tensor.bytes for tensor in tensors))
    # Of one micro-batch, for the weights are stored as matmuls read them: only ZeRO copies them.
    execution = replace(decide_evaluation(cfg, sizes), micro_batches=1)
    gathered = ParameterBytes(cfg, sizes, execution, count, layers).weights()
    rows, length = micro_batch_shape(cfg, sizes)
    streams = 2 * rows * length * cfg.model.hidden_size
    forward = gathered + width * (count.whole_layer + streams) + max(computed)
    return {"weights": width * count.shard, "forward pass": forward}


def _reference_bytes(cfg: Config, count: Counts) -> float:
    """The bytes of weights that a reference holds beside the policy's (`post/base/roles.py`)."""
    if cfg.lora.begins_at_base and cfg.preference.reference is None:
        return 0.0
    itemsize = jnp.dtype(cfg.precision.compute).itemsize
    return count.shard * count.trained_share * itemsize


def _activation_bytes(
    cfg: Config,
    sizes: dict[str, int],
    execution: Execution,
    layers: HeldLayers,
    traced: Traced,
) -> float:
    """The bytes that all layers keep on the device for their backward."""
    to_host = offloaded(cfg.train.offload)
    reordered = _reordered_bytes(cfg, sizes, execution)
    total = 0.0
    for (kind, policy), count in Counter(layers.each).items():
        found = traced[kind, policy]
        on_device = sum(t.bytes for t in found if not t.goes_to_host(policy, to_host))
        total += layers.waiting * count * on_device
        total += count * reordered * (policy == "none")
    # The layers of multi-token prediction; what they keep waits for nothing.
    for kind in cfg.model.prediction_kinds:
        policy = layers.each[-1][1]
        total += sum(t.bytes for t in traced[kind, policy])
    return total


def counts_on_device(cfg: Config, sizes: dict[str, int], specs: dict) -> Counts:
    """Parameters on a device, from the shapes of their shards.

    Uneven pipeline stages have slots for more layers than there are.
    """
    layout = layout_of(cfg) if sizes["pp"] > 1 else None
    parallel = parallel_of_run(cfg, sizes)
    stored = storage_specs(layout, specs)
    placement = place(stored, parallel, cfg.mesh.zero_stage, cfg.mesh.zero_group)
    found: list[ParamPlacement] = []
    layers: dict[str, float] = {}
    for name in placement.specs:
        of_part: list[ParamPlacement] = []
        placement.part(name).map(of_part.append)
        layers[name] = sum(where.layer.weight_size for where in of_part if where.spec.is_stacked)
        found += of_part
    held = [where for where in found if where.spec.held]
    found = [where for where in found if not where.spec.held]
    stacks = [where for where in found if where.spec.is_stacked]
    trained = [where for where in found if where.spec.is_trained]
    trained_of_role: Counter[str] = Counter()
    for where in trained:
        trained_of_role[where.spec.role] += where.stored_size
    weights = sum(where.weight_size for where in found)
    rounded = [where for where in stacks if where.spec.takes_fp8 and is_matmul_weight(where)]
    of_stacks = sum(where.weight_size for where in stacks)
    several = [where for where in stacks if where.spec.is_trained and where.spec.shape[0] > 1]
    of_experts = [where for where in several if where.spec.is_of_experts]
    return Counts(
        tables=weights - of_stacks,
        stacks=of_stacks,
        eight_bits=sum(where.weight_size for where in rounded),
        shard=sum(where.stored_size for where in found),
        trained_of_role=trained_of_role,
        trained_share=sum(where.weight_size for where in trained) / weights,
        whole_layer=max(layers.values()),
        stored_stacks=sum(where.stored_size for where in stacks),
        expert_stack=max((where.stored_size for where in of_experts), default=0),
        held_bytes=sum(map(_held_size, held)),
        held_rows=sum(_held_size(w) for w in held if w.spec.is_stacked and w.spec.matmul),
    )


def _held_size(where: ParamPlacement) -> float:
    return where.stored_size * where.spec.held_bytes


@dataclass(frozen=True)
class ParameterBytes:
    """The bytes on one device of parameters in each of their lives: a method each.

    Each method names the fields of `Execution` that cause what it counts. `sizes` are those of the
    mesh axes, `count` the parameters of the device, `layers` its layers.
    """

    cfg: Config
    sizes: dict[str, int]
    execution: Execution
    count: Counts
    layers: HeldLayers

    def by_life(self) -> dict[str, float]:
        """All of them, by names for a message."""
        return {
            "masters": self.masters(),
            "moments": self.moments(),
            "weights": self.weights(),
            "copies of the base": self.copies_of_base(),
            "transposed weights": self.transposed_weights(),
            "gradients": self.sums(),
            "gradients of a micro-batch": self.gradients(),
            "a stack of experts' gradients": self.stacked_gradients(),
        }

    def masters(self) -> float:
        """The shards that the optimizer updates, and the base of adapters.

        ZeRO-3 makes one layer of a base whole at a time. FP8 makes its 8-bit forms.
        """
        count, base = self.count, self.count.held_bytes
        if base and self._gathers_in_layers and self._is_cut:
            base += WIDTH[self.execution.compute] * count.whole_layer
        if base and self.execution.recipe is not None:
            base += 2 * count.held_bytes / WIDTH[self.execution.compute]
        return WIDTH[self.cfg.precision.params] * count.shard + base

    def moments(self) -> float:
        """The optimizer's state, unless it waits on the host."""
        optimizer = self.cfg.optimizer
        return 0.0 if optimizer.offload is True else moment_bytes_on_device(optimizer, self.count)

    def weights(self) -> float:
        """The weights that matmuls read: by `gather` all or a layer's, by `recipe` in 8 bits.

        With one micro-batch, weights that nothing gathers are cast where they are used.
        """
        is_gathered = self._is_cut and self.cfg.mesh.zero_stage
        if self.execution.micro_batches == 1 and not is_gathered and not self.execution.pipelined:
            return 0.0
        width = WIDTH[self.execution.compute]
        recipe = self.execution.recipe
        saved = 0.0 if recipe is None else (width - recipe.weight_bytes) * self._share_in_8_bits
        of_layers = width - saved
        return width * self.count.tables + of_layers * self._whole_stacks

    def copies_of_base(self) -> float:
        """The rows of the stacks of adapters' base, with several `micro_batches` or ZeRO-3.

        Unrolled layers need them, for no matmul reads a row of a stack. With a `recipe` only the
        8-bit forms are copied, which `masters` counts.
        """
        several = self.execution.micro_batches > 1 or self._gathers_in_layers
        in_rows = not self.execution.loops and self.execution.recipe is None
        return self.count.held_rows if several and in_rows else 0.0

    def transposed_weights(self) -> float:
        """The 8-bit form (`recipe`) for the backward, made once a step where layers are `apart`."""
        made_once = self.execution.apart and self.execution.gather == "step"
        return self.count.eight_bits if self._share_in_8_bits and made_once else 0.0

    def gradients(self) -> float:
        """A micro-batch's gradients before they are added; `sums_in_matmuls` leaves few."""
        if self.execution.micro_batches == 1:
            return 0.0
        given = self.count.tables
        if not self.execution.sums_in_matmuls:
            given += self._whole_stacks
        return self.count.trained_share * WIDTH[self.execution.compute] * given

    def sums(self) -> float:
        """The sums of gradients, shards by `reduce`.

        The sums of a pipeline's chunk exist once more where a slot chooses what it does.
        """
        slots = len(self.layers.each) * self.layers.chunks * self.sizes["pp"]
        has_choice = slots > self.cfg.model.num_hidden_layers
        chosen = self.count.stacks / self.layers.chunks if has_choice else 0.0
        again = WIDTH[self.execution.compute] * chosen
        return self.count.trained_share * (self._summed() + again)

    def _summed(self) -> float:
        """The bytes of the sums, were all parameters trained.

        With one micro-batch they wait in the dtype of weights where nothing but shards is made of
        them.
        """
        count, execution = self.count, self.execution
        zero, width = self.cfg.mesh.zero_stage, WIDTH[execution.accumulate]
        whole = count.tables + count.stacks
        goes_to_shards = zero in (1, 2) or not self._is_cut
        if self.execution.micro_batches == 1 and not execution.pipelined and goes_to_shards:
            return WIDTH[execution.compute] * whole
        if execution.reduce == "micro_batch" or (zero == 2 and self._is_cut):
            return width * count.shard
        if self._gathers_in_layers:
            return width * (count.tables + count.stored_stacks)
        return width * whole

    def stacked_gradients(self) -> float:
        """The largest stack of experts, made of the sums of layers that were not `gradients_apart`.

        There is no free place for it.
        """
        execution = self.execution
        is_made = execution.sums_in_matmuls and not execution.gradients_apart
        return WIDTH[execution.accumulate] * self.count.expert_stack if is_made else 0.0

    @property
    def _is_cut(self) -> bool:
        """Whether several devices hold shards for ZeRO."""
        return self.sizes["dp"] * self.sizes["ep"] * self.sizes["cp"] > 1

    @property
    def _gathers_in_layers(self) -> bool:
        return self.execution.gather == "layer" and self.cfg.mesh.zero_stage == 3

    @property
    def _whole_stacks(self) -> float:
        """Weights of layers that are whole at a time."""
        stacks = self.count.stacks
        if self._gathers_in_layers:
            return min(stacks, self.count.stored_stacks + self.count.whole_layer)
        return stacks

    @property
    def _share_in_8_bits(self) -> float:
        """The share of the stacks that are held in 8 bits."""
        recipe, left_out = self.execution.recipe, any(self.cfg.precision.fp8_left_out)
        rounds = recipe is not None and recipe.stores_weights and not left_out
        return self.count.eight_bits / self.count.stacks if rounds else 0.0


def moment_bytes_on_device(optimizer: OptimizerConfig, count: Counts) -> int:
    """The bytes of moments on one device, or on the host for it; Muon keeps fewer of matrices."""
    of_roles = count.trained_of_role.items()
    return sum(stored * moment_bytes(optimizer, role) for role, stored in of_roles)


def _reordered_bytes(cfg: Config, sizes: dict[str, int], execution: Execution) -> float:
    """The bytes of a ring over cp that a layer also keeps, if it keeps all.

    A backward of unrolled layers would gather and reorder anew what the ring did in its forward.
    XLA finds that out and keeps it: keys, values, and six times the queries.
    """
    heads, (rows, _) = model_heads(cfg.model), micro_batch_shape(cfg, sizes)
    has_ring = sizes["cp"] > 1 and cfg.mesh.cp_type != "a2a"
    if not has_ring or execution.pipelined or execution.loops:
        return 0.0
    if heads is None or heads.size != heads.value_size:  # rings have heads of one size only
        return 0.0
    queries = heads.heads * heads.size / sizes["cp"]
    width = (heads.kv_channels + 6 * queries) / sizes["tp"]
    return WIDTH[cfg.precision.compute] * rows * cfg.data.seq_length * width


def _loss_bytes(cfg: Config, sizes: dict[str, int]) -> float:
    """The loss's fp32 gradient of the head, and a chunk's logits and their gradient.

    For the contrastive loss, the vectors of the batch and their gradients, likewise.
    """
    rows, _ = micro_batch_shape(cfg, sizes)
    if cfg.model.architecture.compares:
        pairs = min(LOGIT_ROWS, rows)
        width = 4 * cfg.model.contrastive.projection_dim + 3 * pairs
        return 4.0 * cfg.train.global_batch_size * width
    if cfg.model.architecture.predicts != "tokens":
        return 0.0
    words = cfg.model.padded_vocab_size // sizes["tp"]
    length = cfg.data.target_length or cfg.data.seq_length
    tokens = rows * length // sizes["cp"]
    chunk = cfg.train.loss_chunk
    fused = fits(tokens, words, sizes["tp"], chunk)
    cut = cut_of(tokens, words, chunk, fused=fused)
    return 4 * words * cfg.model.hidden_size + cut.bytes(words)


def ways_to_save(cfg: Config) -> list[str]:
    """Changes by which a run needs less memory, the cheapest first."""
    train, mesh, ways = cfg.train, cfg.mesh, []
    if train.micro_batch_size != 1:
        ways.append(f"lower train.micro_batch_size={train.micro_batch_size}")
    if train.remat != "full":
        ways.append(f"set train.remat=full (now {train.remat})")
    if mesh.zero_stage < 3:
        ways.append(f"raise mesh.zero={mesh.zero} to 3, which several devices share")
    if not cfg.optimizer.offload:
        ways.append("set optimizer.offload=true")
    if cfg.precision.params == "float32":
        ways.append("store moments in bfloat16 (optimizer.mu_dtype, nu_dtype)")
    ways.append("shorten data.seq_length, or take more devices (mesh.tp, mesh.pp)")
    return [f"to mend it, {ways[0]}", *ways[1:]]
