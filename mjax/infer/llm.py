"""`LLM(path)`: a model with its tokenizer and engine, for texts in bulk.

`LLM("runs/quickstart").generate(["Once upon"])` gives a `RequestOutput` for each prompt, in order.
Names of arguments are vLLM's where it has one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mjax.checkpoint.base.companion_files import end_ids, tokenizer_of
from mjax.data.base.chat import load_chat_template
from mjax.data.base.chat_ids import reply_ids
from mjax.data.base.tokenizer import Tokenizer, load_tokenizer
from mjax.errors import UserError
from mjax.infer.checks import text_length
from mjax.infer.engine import Engine
from mjax.infer.records import Request
from mjax.infer.requests import RequestOutput, SamplingParams
from mjax.infer.scheduling.scheduler import Limits, QueueFull
from mjax.infer.weights import usual_dtype
from mjax.interop.adapter_slots import AdapterSlots, slots_of, with_slots_filled
from mjax.interop.adapter_stack import with_stack
from mjax.interop.pretrained import Pretrained
from mjax.interop.random_weights import loader_of
from mjax.json_file import read_json
from mjax.sharding.mesh import tensor_parallel_mesh
from mjax.sharding.processes.compiled_programs import keep_compiled_programs

_GENERATION_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class LLM:
    """A model ready to continue texts. `engine` takes requests one by one. Its options:

    tensor_parallel_size: devices that share each layer.
    pipeline_parallel_size: stages that share the layers, of so many devices each.
    tokenizer: default: the model's own; None is found: prompts are ids and texts empty.
    dtype: default: bfloat16, on a CPU float32.
    max_model_len: tokens of the longest text; default: the model's.
    max_num_seqs: texts that are made at a time.
    max_num_prefill_tokens: tokens of prompts in a step; more delay other texts longer.
    kv_cache_dtype: fp8, or default the model's.
    quantization: fp8 rounds the weights of layers as they are loaded; default: none.
    num_speculative_tokens: guessed in a row of a step; texts stay as they are.
    speculative_method: ngram guesses where a text repeats itself, mtp by the model's own layers of
        multi-token prediction.
    adapters: runs with adapters or folders of PEFT, by the name that requests give.
    max_loras: of adapters that may be there at a time, `slots` of max_lora_rank for them; None:
        those of `adapters` alone.
    max_queued: requests that may wait; None: any number.
    load_format: dummy draws random weights, and reads nothing of the model but its config.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        dtype: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_prefill_tokens: int = 2048,
        kv_cache_dtype: str | None = None,
        quantization: str | None = None,
        enable_prefix_caching: bool = True,
        num_speculative_tokens: int = 0,
        speculative_method: str = "ngram",
        adapters: Mapping[str, str | Path] | None = None,
        max_loras: int | None = None,
        max_lora_rank: int = 16,
        max_queued: int | None = None,
        load_format: str = "auto",
    ):
        """`model`: a run, a checkpoint, RUN@best, a Hugging Face or Megatron folder.

        Raises `UserError` for what cannot be loaded or served.
        """
        keep_compiled_programs()
        dtype, folders = dtype or usual_dtype(), [*(adapters or {}).values()]
        mesh = _serving_mesh(tensor_parallel_size, pipeline_parallel_size)
        apart = pipeline_parallel_size == 1  # stages are made of stacks
        loaded = loader_of(load_format)(model, mesh=mesh, dtype=dtype, apart=apart)
        self.slots = None if max_loras is None else slots_of(loaded, max_loras, max_lora_rank)
        loaded = _with_adapters(loaded, self.slots, folders)
        name = tokenizer or tokenizer_of(model)
        self.mesh, self.dtype, self.definition = mesh, dtype, loaded.definition
        self.folder, self.tokenizer_name = loaded.tokenizer_dir, name
        self.tokenizer: Tokenizer | None = None if name is None else load_tokenizer(name)
        self.engine = Engine(
            loaded.definition,
            loaded.params,
            loaded.cfg,
            dtype=dtype,
            tokenizer=self.tokenizer,
            eos=end_ids(self.folder, self.tokenizer),
            limits=Limits(
                rows=max_num_seqs,
                chunk=max_num_prefill_tokens,
                length=text_length(loaded.cfg, max_model_len),
                queued=max_queued,
            ),
            cache_dtype=kv_cache_dtype,
            weight_dtype=quantization,
            cache_prefixes=enable_prefix_caching,
            drafts=num_speculative_tokens,
            drafter=speculative_method,
            adapters=tuple(adapters or ()),
            donate=True,
        )

    def default_params(self) -> SamplingParams:
        """The settings of the model's generation_config.json; greedy where it has none."""
        if self.folder is None:
            return SamplingParams()
        said = read_json(self.folder / "generation_config.json", missing={})
        given = {name: said[name] for name in _GENERATION_KEYS if said.get(name) is not None}
        if not said.get("do_sample", True):
            given = {name: given[name] for name in given if name == "repetition_penalty"}
        return SamplingParams(**given)

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, a text or ids; outputs come in the order of prompts.

        params: of all, or of each; None: `default_params`.
        """
        asked = _several(prompts)
        if params is None:
            params = self.default_params()
        is_one = isinstance(params, SamplingParams | Mapping)  # the engine refuses a mapping
        each: Any = [params] * len(asked) if is_one else params
        if len(each) != len(asked):
            raise UserError(f"{len(asked)} prompts and {len(each)} params: give one for each")
        requests: list[Request] = []
        try:
            for prompt, wanted in zip(asked, each, strict=True):
                text = prompt if isinstance(prompt, str) else None
                ids = prompt if text is None else self.encode(text)
                requests.append(self._add(ids, wanted, text))
            while self.engine.has_work:
                self.engine.step()
            if not all(request.output.finished for request in requests):
                raise UserError(
                    "the engine is paused or has no weights; resume it, or give it some"
                )
        except BaseException:  # a later call must not find them
            for request in requests:
                self.engine.abort(request.output.request_id)
            for lane in self.engine.lanes:  # pages may be shared whose step was never launched
                lane.pool.forget()
            raise
        return [request.output for request in requests]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the model's chat template.

        `variables` are further ones that the template reads, `tools` among them.
        """
        if self.folder is None or self.tokenizer is None:
            raise UserError("the model has no chat template; give texts to generate")
        template = load_chat_template(self.folder)
        chats: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [reply_ids(chat, self.tokenizer, template, **variables) for chat in chats]
        return self.generate(prompts, params)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, after the tokens that the model wants before a text."""
        if self.tokenizer is None:
            raise UserError("the model has no tokenizer; give ids, or LLM(.., tokenizer=..)")
        return [*self.tokenizer.prefix, *self.tokenizer.encode(text)]

    def _add(self, ids: Sequence[int], params: SamplingParams, text: str | None) -> Request:
        while True:
            try:
                return self.engine.add(ids, params, text=text)
            except QueueFull:
                self.engine.step()


def _with_adapters(
    loaded: Pretrained, slots: AdapterSlots | None, folders: Sequence[str | Path]
) -> Pretrained:
    """The model with the adapters in folders beside its weights, if any."""
    if slots is not None:
        return with_slots_filled(loaded, slots, folders)
    return with_stack(loaded, folders) if folders else loaded


def _serving_mesh(devices: int, stages: int) -> Mesh | None:
    """The mesh of an engine. Raises `UserError` where there is none of these sizes."""
    option = f"tensor_parallel_size={devices}"
    if stages != 1:
        option += f" and pipeline_parallel_size={stages}"
    return tensor_parallel_mesh(devices, option, stages)


def _several(prompts: Prompts) -> Sequence[Any]:
    """Prompts as a list, also of one; arrays of numpy as lists."""
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise UserError(f"prompts are a {type(prompts).__name__}; give texts or lists of token ids")
    is_one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | np.integer))
    return [prompts] if is_one else prompts
