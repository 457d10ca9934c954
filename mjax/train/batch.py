"""A global batch of numpy arrays -> sharded arrays on the mesh, with the place of every token.

Invariant: a token's row and column are those of the global batch, whatever the mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.config.schema.run import Config
from mjax.errors import UserError
from mjax.kernels.base.chooser import this_device
from mjax.models.attention.zigzag import zigzag
from mjax.models.base.context import Documents
from mjax.models.towers.image_places import FRAME
from mjax.objectives.fields import FURTHER_COLUMNS, LAYER_FIELDS, Batch, BatchField, HostBatch
from mjax.objectives.objective import FieldMaker, Objective, require_dictionary
from mjax.sharding.collectives import Parallel
from mjax.sharding.mesh import global_array, local_part
from mjax.sharding.rules import partition

# The place of a token in the global batch.
PLACE_FIELDS = {
    "rows": BatchField(np.int32, ("batch",)),
    "columns": BatchField(np.int32, ("seq",)),
}


AheadBatch = tuple[HostBatch, Batch]  # as it was given, and placed


def placed_ahead(
    place: Callable[[HostBatch], Batch], batches: Iterator[HostBatch]
) -> Iterator[AheadBatch]:
    """Each batch and what `place` makes of it, once the next one is placed, too.

    A copy to devices waits for what was dispatched before, so a batch that is placed before the
    step in front of it moves while that runs. The error of a batch comes after all before it.
    """
    ahead, error = None, None
    while error is None:
        try:
            batch = next(batches)
            following = batch, place(batch)
        except (StopIteration, UserError) as e:
            following, error = None, e
        if ahead is not None:
            yield ahead
        ahead = following
    if isinstance(error, UserError):
        raise error


def placed_when_due(
    place: Callable[[HostBatch], Batch], batches: Iterator[HostBatch]
) -> Iterator[AheadBatch]:
    """`placed_ahead` of batches that exist no sooner than they are used."""
    for batch in batches:
        yield batch, place(batch)


def given_fields(objective: Objective) -> dict[str, BatchField]:
    """The fields of a batch before it is placed: those of the objective and of the layers."""
    return {**objective.fields, **LAYER_FIELDS}


def placed_fields(objective: Objective) -> dict[str, BatchField]:
    """The fields of a placed batch: those that it is given with, and the place of each token."""
    fields = given_fields(objective) | PLACE_FIELDS
    axes = {axis for field in fields.values() for axis in field.axes}
    for axis in axes.intersection(FURTHER_COLUMNS):
        fields[FURTHER_COLUMNS[axis]] = BatchField(np.int32, (axis,))
    return fields


def batch_partitions(objective: Objective, parallel: Parallel) -> dict[str, PartitionSpec]:
    """The partition of every field of a batch on the mesh."""
    fields = placed_fields(objective)
    return {name: partition(field.axes, parallel) for name, field in fields.items()}


@dataclass(frozen=True)
class BatchPlacer:
    """Places batches of `objective` on `mesh`.

    `micro_batch_size` sequences a device must divide their rows; token ids are below `vocab_size`.
    `further` has the lengths of axes besides rows and their columns (`further_lengths`), `types`
    is the number of token types.
    """

    mesh: Mesh
    parallel: Parallel
    objective: Objective
    micro_batch_size: int
    vocab_size: int
    further: Mapping[str, int | None]
    types: int = 0

    @property
    def fields(self) -> Mapping[str, BatchField]:
        """The fields that a batch is given with."""
        return given_fields(self.objective)

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of a placed batch."""
        return tuple(placed_fields(self.objective))

    def place(self, batch: HostBatch) -> Batch:
        """This process's rows, numpy [B, ...] fields -> global arrays, rows and columns added.

        Raises `UserError` for a missing field, sizes that do not divide over the mesh and token ids
        that the model does not have.
        """
        rows = self.global_rows(batch)
        _require_token_ids(batch, self.vocab_size)
        if "token_types" in self.fields:
            _require_below("token_types", batch["token_types"], self.types, "bert.type_vocab_size")
        width = batch["positions"].shape[1]
        lengths = {"seq": width, **self.further}
        mine = self.local_rows(rows)
        lengths_of = {"batch": len(batch["positions"]), **lengths}
        arrays = {}
        for name, field in self.fields.items():
            if self.is_left_to_roles(name, batch):  # a role's field takes this one's place
                if not {"batch", "seq"}.issuperset(field.axes):
                    continue  # no program of this trainer reads the batch before
                given = np.full([lengths_of[axis] for axis in field.axes], field.pad)
            else:
                given = batch[name]
            arrays[name] = np.asarray(given, field.dtype)
        arrays["rows"] = np.arange(rows, dtype=np.int32)[mine]
        arrays["columns"] = np.arange(width, dtype=np.int32)
        fields = placed_fields(self.objective)
        for axis, name in FURTHER_COLUMNS.items():
            if name in fields:
                arrays[name] = np.arange(lengths[axis], dtype=np.int32)
        split_over_cp = {"seq", *FURTHER_COLUMNS} if self.parallel.cp > 1 else set()
        shardings = self.shardings()
        placed = {}
        for name, array in arrays.items():
            axes = fields[name].axes
            for axis in split_over_cp.intersection(axes):
                array = array.take(zigzag(lengths[axis], self.parallel.cp), axes.index(axis))
            size, first = (rows, mine.start) if "batch" in axes else (len(array), 0)
            placed[name] = global_array(array, shardings[name], size, first)
        return placed

    def is_left_to_roles(self, name: str, batch: HostBatch) -> bool:
        """Whether a batch is given without a field that a role computes."""
        return self.fields[name].is_computed and name not in batch

    def abstract(self, rows: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and shardings of a placed batch of `rows` sequences."""
        size = {"batch": rows, "seq": width, **self.further}
        shardings = self.shardings()
        shapes = {}
        for name, field in placed_fields(self.objective).items():
            shape = tuple(size[axis] for axis in field.axes)
            shapes[name] = jax.ShapeDtypeStruct(shape, field.dtype, sharding=shardings[name])
        return shapes

    def shardings(self) -> dict[str, NamedSharding]:
        partitions = batch_partitions(self.objective, self.parallel)
        return {name: NamedSharding(self.mesh, cut) for name, cut in partitions.items()}

    def local_rows(self, count: int) -> slice:
        """The rows, of `count` in a global batch, that this process's devices work on."""
        rows = partition(("batch",), self.parallel)
        return local_part(NamedSharding(self.mesh, rows), count)

    def global_rows(self, batch: HostBatch) -> int:
        """The rows of the global batch that this process's part belongs to; checks its sizes."""
        for name, field in self.fields.items():
            if name not in batch and not field.is_computed:
                needed = ", ".join(self.fields)
                raise UserError(f"batch: field {name!r} is missing; it needs {needed}")
        shape = np.shape(batch["positions"])
        if len(shape) != 2 or 0 in shape:
            raise UserError(f"batch: positions has shape {shape}; it must be [sequences, tokens]")
        sizes = {"batch": shape[0], "seq": shape[1], **self.further}
        for name, field in self.fields.items():
            if self.is_left_to_roles(name, batch):
                continue
            if not sizes.keys() >= set(field.axes):
                raise UserError(
                    f"batch: {name} has the axes {field.axes}; known: {', '.join(sizes)}"
                )
            wanted = tuple(sizes[axis] for axis in field.axes)
            _require_field(name, np.asarray(batch[name]), wanted, np.dtype(field.dtype))
        local, width = shape
        devices = self.parallel.size("dp", "ep")
        here = self.local_rows(devices)  # this process's parts of a batch
        rows = local * devices // (here.stop - here.start)
        size = min(self.micro_batch_size, rows // devices)
        cuts = self.parallel.tp if self.parallel.cp == 1 else 2 * self.parallel.size("cp", "tp")
        if rows % devices or rows // devices % max(size, 1) or width % cuts:
            raise UserError(
                f"batch: {rows} sequences of {width} tokens do not divide over dp*ep={devices}, "
                f"train.micro_batch_size={size} and tp={self.parallel.tp}, cp={self.parallel.cp} "
                "(zigzag: 2*cp*tp); change one of them"
            )
        return rows


def _require_field(name: str, given: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise `UserError` unless a field of a batch has this shape and values that `dtype` holds."""
    if given.shape != shape:
        raise UserError(f"batch: {name} has shape {given.shape}; it must be {shape}")
    if dtype.kind == "i" and given.dtype.kind not in "iub":
        raise UserError(f"batch: {name} holds {given.dtype}; give whole numbers of {dtype}")
    if dtype.kind == "f" and given.dtype.kind not in "fiub":
        raise UserError(f"batch: {name} holds {given.dtype}; give numbers of {dtype}")


def _require_token_ids(batch: HostBatch, vocab_size: int) -> None:
    """Raise `UserError` for a token id outside the vocabulary, or a label that counts and is."""
    for name in ("tokens", "labels", "decoder_tokens", "neighbors"):
        if name not in batch:
            continue
        ids = np.asarray(batch[name])
        if name == "labels" and "loss_mask" in batch:
            ids = ids[np.asarray(batch["loss_mask"]) != 0]
        if name == "neighbors":
            ids = ids[ids != -1]  # padding
        _require_below(name, ids, vocab_size, "vocab_size")


def _require_below(name: str, ids: np.ndarray, size: int, key: str) -> None:
    """Raise `UserError` unless the ids of a field are those of a table of `model.{key}` rows."""
    lowest, highest = np.min(ids, initial=0), np.max(ids, initial=0)
    if lowest < 0 or highest >= size:
        bad = lowest if lowest < 0 else highest
        raise UserError(
            f"batch: {name} holds id {bad}, outside model.{key}={size}; use the tokenizer of this "
            "model"
        )


def most_documents(batch: HostBatch) -> int:
    """The largest number of documents in a sequence of a batch, a decoder's beside an encoder's."""
    fields = [np.asarray(batch[name]) for name in batch if name.endswith("segment_ids")]
    return 1 + max(int((np.diff(ids, axis=1) != 0).sum(1).max(initial=0)) for ids in fields)


def only_padding_follows(batch: HostBatch) -> bool:
    """Whether a sequence that ends in another segment than its first ends in padding, segment 0."""
    fields = [np.asarray(batch[name]) for name in batch if name.endswith("segment_ids")]
    return all(((ids[:, -1] == 0) | (ids[:, -1] == ids[:, 0])).all() for ids in fields)


def most_images(batch: HostBatch) -> int:
    """The largest number of `Documents.images` in a row of a batch; 0: it has none."""
    places = batch.get("patch_places")
    return 0 if places is None else 1 + int(np.max(places[..., FRAME], initial=0))


def promises_of(batch: HostBatch) -> Documents:
    """The promises of a batch, as `Programs.bound_documents` takes them."""
    return Documents(most_documents(batch), only_padding_follows(batch), most_images(batch))


def bound_of_documents(cfg: Config, most: int) -> int:
    """Documents a sequence to compile for, where a sequence has at most `most`; 0: no bound.

    The bound is rounded up to a power of two, so that few programs serve all batches. Only cuDNN's
    packed attention needs it.
    """
    attention = cfg.train.attention
    if attention == "auto" and this_device().backend == "cpu":
        attention = "xla"
    if not (most and cfg.data.document_mask) or attention == "xla":
        return 0
    return 1 << (most - 1).bit_length()


def field_maker(cfg: Config, objective: Objective) -> Callable | None:
    """The `make_fields` of `make_loader` for this objective; None: a data set has its fields."""
    if not isinstance(objective, FieldMaker):
        return None

    def make(batch: HostBatch, step: int, rows: np.ndarray) -> HostBatch:
        made = objective.make_fields(batch, cfg.run.seed, step, rows)
        require_dictionary(objective, "make_fields", made)
        return made

    return make
