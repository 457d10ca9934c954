"""A model for an engine server: its engine, its embeddings, and commands that change it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mjax.checkpoint.base.companion_files import tokenizer_of
from mjax.checkpoint.base.hub import model_folder
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import MeshConfig
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.multimodal.pictures import bounds_of
from mjax.errors import UserError
from mjax.generate.options import image_scale, usual_scale
from mjax.infer.checks import text_length
from mjax.infer.engine import GREEDY, LIMITED, RANDOM
from mjax.infer.llm import LLM
from mjax.infer.sample import Draws
from mjax.infer.stages.weights_in_stages import arrays_in_stages
from mjax.infer.weights import form_of, require_weights, usual_dtype
from mjax.interop.adapter_slots import AdapterSlots, with_changed
from mjax.interop.pretrained import Pretrained, from_pretrained
from mjax.interop.random_weights import loader_of
from mjax.interop.sources import config_in
from mjax.serve.base.wire import ImageFacts, ModelFacts
from mjax.serve.embeddings import Embedder
from mjax.serve.engine_server import BetweenSteps, EngineServer
from mjax.serve.options import ServeOptions
from mjax.sharding.mesh import make_mesh, tensor_parallel_mesh
from mjax.sharding.processes.compiled_programs import keep_compiled_programs

ANYTHING = Draws(random=True, limited=True, penalties=True, top=20)
# Where nothing says them: rows and tokens of prompts in a step, and what programs draw. Requests
# that say nothing are drawn at temperature 1, by RANDOM without the 20 kernels of LIMITED's
# thresholds. A CPU gains little from many sizes, and compiles them for minutes.
_USUAL = 256, 2048, (GREEDY, RANDOM, LIMITED, ANYTHING)
_ON_A_CPU = 16, 512, (ANYTHING,)


class EncoderAlone:
    """The place of an engine where a model continues no text."""

    has_work, version, verified, accepted = False, 0, 0, 0

    def __init__(self) -> None:
        self.lanes, self.requests, self.adapters = [], {}, {}
        self.compiled = {}
        self.runner = self  # it has no programs of steps

    def add(self, *_: object, **__: object) -> None:
        raise UserError("this model continues no text: ask for embeddings")

    def abort(self, request_id: str) -> None:
        """Do nothing: there are no requests."""


class ServedModel:
    """A loaded model as `EngineServer` wants it."""

    def __init__(self, options: ServeOptions):
        """Load it. Raises `UserError` for what cannot be loaded or served."""
        self.options = options
        self.slots: AdapterSlots | None = None
        self._params: dict | None = None  # of an encoder
        cfg = config_in(options.model)
        architecture = cfg.architecture
        if architecture.generates or architecture.reads_target:
            self._load_generator(cfg)
        else:
            self._load_encoder(cfg)

    def _load_generator(self, cfg: ModelConfig) -> None:
        rows, tokens, draws = _ON_A_CPU if jax.default_backend() == "cpu" else _USUAL
        sizes = {"max_num_seqs": rows, "max_num_prefill_tokens": tokens}
        said = {name: value for name, value in self.options.engine.items() if value is not None}
        llm = LLM(self.options.model, **sizes | said)
        self.engine, self.slots, self.dtype = llm.engine, llm.slots, llm.dtype
        made = llm.engine
        self.embedder: Embedder | None = None
        in_stages = self.options.engine.get("pipeline_parallel_size", 1) > 1
        if not (cfg.architecture.reads_target or in_stages):
            given = self.options.engine.get("quantization")
            form = form_of(given, llm.definition.specs)
            places = llm.mesh, jnp.dtype(llm.dtype), made.limits.length, form
            self.embedder = Embedder(llm.definition, made.cfg, *places)
        self.facts = ModelFacts(
            name=self.options.name,
            folder=llm.folder,
            max_model_len=made.limits.length,
            vocab_size=cfg.vocab_size,
            has_images="vision" in cfg.modalities,
            reads_source=cfg.architecture.reads_target,
            created=int(time.time()),
            adapters=tuple(made.adapters),
            defaults=llm.default_params(),
            ends=made.eos,
            tokenizer=None if llm.tokenizer_name is None else str(llm.tokenizer_name),
            image=self._image(cfg),
        )
        if self.options.warm_up:
            made.warm_up(draws, all_rules=True)

    def _load_encoder(self, cfg: ModelConfig) -> None:
        keep_compiled_programs()
        given = self.options.engine
        size = given.get("tensor_parallel_size", 1)
        if given.get("pipeline_parallel_size", 1) > 1:
            raise UserError("--pipeline-parallel-size: an encoder has no stages here; leave it out")
        mesh = tensor_parallel_mesh(size, f"--tensor-parallel-size {size}")
        dtype = given.get("dtype") or usual_dtype()
        load = loader_of(given.get("load_format", "auto"))
        loaded = load(self.options.model, mesh=mesh, dtype=dtype)
        length = text_length(cfg, given.get("max_model_len"))
        self.engine, self._params, self.dtype = EncoderAlone(), loaded.params, dtype
        self.embedder = Embedder(loaded.definition, loaded.cfg, mesh, jnp.dtype(dtype), length)
        name = given.get("tokenizer") or tokenizer_of(self.options.model)
        if name is not None:
            load_tokenizer(name)  # what is wrong with it should show here
        self.facts = ModelFacts(
            name=self.options.name,
            folder=loaded.tokenizer_dir,
            max_model_len=length,
            vocab_size=cfg.vocab_size,
            is_encoder=True,
            created=int(time.time()),
            tokenizer=None if name is None else str(name),
        )

    def _image(self, cfg: ModelConfig) -> ImageFacts | None:
        """How prompts have images; those in tiles are not served."""
        vision = cfg.vision
        if "vision" not in cfg.modalities or vision.is_cut:
            return None
        found, usual = image_scale(model_folder(self.options.model)), usual_scale(vision)
        scale = [tuple(own or other) for own, other in zip(found, usual, strict=True)]
        if vision.is_packed:
            token = (vision.image_token_id,)
            return ImageFacts(token, 0, vision.num_channels, *scale, tuple(bounds_of(vision)))
        count = cfg.tower("vision").text_tokens(None)
        tokens = (cfg.tower("vision").token_id,) * count
        return ImageFacts(tokens, vision.image_size, vision.num_channels, *scale)

    def add_commands(self, server: EngineServer) -> None:
        """Give the server of this model the commands that change it."""
        server.slow |= {
            "reload": lambda path=None: self._reload(server, path or self.options.model),
            "load_adapter": lambda name, path: self._load_adapter(server, name, path),
        }
        server.quick |= {
            "embed": self._embed,
            "unload_adapter": lambda name: self._unload_adapter(server, name),
        }

    # ---- commands --------------------------------------------------------------------------------

    def _embed(
        self, prompts: Sequence[Sequence[int]], pooling: str, adapter: str | None = None
    ) -> dict[str, np.ndarray]:
        if self.embedder is None:
            raise UserError(
                "this model has no embeddings: an encoder and a decoder take turns, or its layers "
                "lie in stages; start it without --pipeline-parallel-size"
            )
        params = self._params if self._params is not None else self._weights()
        slot = self.engine.adapters.get(adapter, 0)
        return {"vectors": self.embedder.embed(params, prompts, pooling, slot)}

    def _weights(self) -> dict:
        if self.engine.runner.params is None:
            raise UserError("the engine slept without weights; reload some")
        return self.engine.runner.params

    def _reload(self, server: EngineServer, path: str) -> BetweenSteps:
        """Read other weights of this model into the host's memory; then go on with them."""
        try:
            mesh = make_mesh(MeshConfig(dp=1), jax.devices("cpu")[:1])
        except RuntimeError:  # JAX_PLATFORMS names no CPU
            mesh = None
        loaded = from_pretrained(path, mesh=mesh, dtype=self.dtype)
        return lambda: self._go_on_with(server, loaded)

    def _go_on_with(self, server: EngineServer, loaded: Pretrained) -> dict[str, Any]:
        if self._params is not None:
            require_weights(self.embedder.definition.specs, loaded.params)
            places = jax.tree.map(lambda old: old.sharding, self._params)
            self._params = None  # memory for one copy is enough
            self._params = jax.device_put(loaded.params, places)
            self.engine.version += 1
        else:
            if self.slots is not None:
                loaded = self.slots.beside(loaded)
            server.report(self.engine.update_weights(loaded.params, donate=True))
        return {"version": self.engine.version}

    def _load_adapter(self, server: EngineServer, name: str, path: str) -> BetweenSteps:
        if self.slots is None:
            raise UserError("there is no room for adapters: start the server with --max-loras N")
        found = self.slots.read(path)

        def fill() -> dict[str, Any]:
            if name in self.engine.adapters or name == server.facts.name:
                raise UserError(f"{name} is there already; unload it, or give another name")
            slot = self._free_slot()
            runner, held = self.engine.runner, self._weights()
            changed = arrays_in_stages(self.slots.put(slot, found), runner.programs.layout)
            runner.params = with_changed(held, changed)
            self.engine.adapters[name] = slot
            server.forget_prefixes()  # of another adapter of this name
            self._tell(server)
            return {"slot": slot}

        return fill

    def _free_slot(self) -> int:
        """A slot that neither a name nor a running request has."""
        samples = [s for request in self.engine.requests.values() for s in request.samples]
        taken = {*self.engine.adapters.values(), *(sample.adapter for sample in samples)}
        free = [slot for slot in range(1, self.slots.count + 1) if slot not in taken]
        if not free:
            raise UserError(
                f"all {self.slots.count} slots for adapters are taken: unload one and let its "
                "requests end, or start the server with a larger --max-loras"
            )
        return free[0]

    def _unload_adapter(self, server: EngineServer, name: str) -> None:
        if name not in self.engine.adapters:
            have = ", ".join(self.engine.adapters) or "none"
            raise UserError(f"there is no adapter {name} here: {have}")
        del self.engine.adapters[name]
        self._tell(server)

    def _tell(self, server: EngineServer) -> None:
        server.tell_facts(replace(server.facts, adapters=tuple(self.engine.adapters)))
