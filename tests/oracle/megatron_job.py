# ruff: noqa: E501
"""Runs Megatron-core itself on CPU: a tiny model is saved or loaded, and trained.

`python megatron_job.py JOB.json` starts one process a rank (gloo). A job names Megatron's
arguments, the sizes tp, pp and ep, a folder to write or read, steps to train, and the file for results.
Megatron-core needs no GPU for this: its local layers, sequential experts, torch's Adam.
"""

import argparse
import json
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.multiprocessing
from torch.nn import functional as F


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    world = job.get("world", job["tp"] * job["pp"] * job["ep"])
    torch.multiprocessing.start_processes(_rank, (job, world), nprocs=world, start_method="spawn")


def _rank(rank: int, job: dict, world: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.current_stream = lambda *_: SimpleNamespace(wait_stream=lambda *_: None)
    type_of = torch.Tensor.type
    torch.Tensor.type = lambda x, *a: (
        type_of(x, *a) if a else "torch.cuda." + type_of(x).split(".")[-1]
    )
    torch.cuda.synchronize = lambda *_: None
    store = torch.distributed.FileStore(job["result"] + ".store", world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        job["tp"], job["pp"], expert_model_parallel_size=job["ep"], create_gloo_process_groups=True
    )
    tensor_parallel.random.initialize_rng_tracker()
    _seed_trackers()
    torch.manual_seed(1)
    _stand_ins()
    _OnCpu().__enter__()
    args = argparse.Namespace(**job["args"])
    model = {"gpt": _gpt, "bert": _bert, "hybrid": _hybrid, "t5": _t5, "llava": _llava}[
        job.get("kind", "gpt")
    ](args, job)
    if job.get("noise", True):
        _disturb(model)
    _run(job, args, model)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class _OnCpu(torch.overrides.TorchFunctionMode):
    """Makes on the CPU what Megatron-core asks for on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def _stand_ins() -> None:
    """Plain torch for two parts that Megatron-core takes from Transformer Engine alone."""
    from megatron.core.transformer import dot_product_attention, module
    from megatron.core.transformer.moe import moe_layer
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    class Linear(torch.nn.Linear):
        def __init__(self, inputs, outputs, *, bias, **_):
            super().__init__(inputs, outputs, bias=bias)
            generator = torch.Generator().manual_seed(inputs * 1000 + outputs)
            self.weight.data = 0.2 * torch.randn(self.weight.shape, generator=generator)

        def forward(self, x):
            return super().forward(x), None

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            state = self.state_dict(prefix="", keep_vars=True)
            return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)

    def start(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        **_,
    ):
        module.MegatronModule.__init__(self, config=config)
        self.softmax_scale, self.layer_number = softmax_scale, layer_number

    def attend(self, q, k, v, mask, attention_bias=None, **_):
        scale = self.softmax_scale or q.shape[-1] ** -0.5
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        scores = torch.einsum("sbnh,tbnh->bnst", q, k) * scale
        scores = scores if attention_bias is None else scores + attention_bias
        scores = scores if mask is None else scores.masked_fill(mask, -torch.inf)
        probs = scores.softmax(-1)
        return torch.einsum("bnst,tbnh->sbnh", probs, v).flatten(2)

    plain = dot_product_attention.DotProductAttention
    plain.__init__, plain.forward = start, attend
    plain.sharded_state_dict = lambda self, *_, **__: {}
    moe_layer.HAVE_TE, moe_layer.TELinear = True, Linear


def _seed_trackers() -> None:
    from megatron.core.tensor_parallel import random

    tracker = random.get_cuda_rng_tracker()
    import contextlib

    tracker.fork = lambda *a, **k: contextlib.nullcontext()
    tracker.states_ = {
        "model-parallel-rng": None,
        "expert-parallel-rng": None,
        "data-parallel-rng": None,
    }


def _config(args, job):
    import dataclasses

    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.heterogeneous import heterogeneous_config

    kind = TransformerConfig
    if getattr(args, "multi_latent_attention", False):
        kind = MLATransformerConfig
    if getattr(args, "heterogeneous_layers_config_encoded_json", None):
        kind = heterogeneous_config.HeterogeneousTransformerConfig
    fields = {f.name for f in dataclasses.fields(kind)}
    values = {
        k: v for k, v in vars(args).items() if k in fields and (v is not None or k == "q_lora_rank")
    }
    values |= {
        "num_moe_experts": args.num_experts,
        "layernorm_epsilon": args.norm_epsilon,
        "bias_activation_fusion": False,
        "tensor_model_parallel_size": job["tp"],
        "pipeline_model_parallel_size": job["pp"],
        "expert_model_parallel_size": job["ep"],
        "expert_tensor_parallel_size": job.get("etp", job["tp"] if job["ep"] == 1 else 1),
        "sequence_parallel": False,
        "pipeline_dtype": torch.float32,
        "params_dtype": torch.float32,
        "use_cpu_initialization": True,
        "layernorm_zero_centered_gamma": bool(getattr(args, "apply_layernorm_1p", False)),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
    }
    if args.swiglu:
        values |= {"activation_func": F.silu, "gated_linear_unit": True}
    elif getattr(args, "squared_relu", False):
        from megatron.core.activations import squared_relu

        values |= {"activation_func": squared_relu}
    values["num_query_groups"] = args.num_query_groups if args.group_query_attention else None
    return kind(**values)


def _gpt(args, job):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    config = _config(args, job)
    if getattr(args, "heterogeneous_layers_config_encoded_json", None):
        from megatron.core.models.gpt.heterogeneous import heterogeneous_layer_specs as specs

        spec = specs.get_gpt_heterogeneous_layer_spec(config)
    else:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp = None
    if getattr(args, "mtp_num_layers", None):
        layers = gpt_layer_specs.get_gpt_decoder_layer_specs(
            config, use_transformer_engine=False, normalization=args.normalization
        )
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, layers[-1], use_transformer_engine=False
        )
    return GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=getattr(args, "rotary_percent", 1.0),
        rotary_base=getattr(args, "rotary_base", 10000),
        rope_scaling=getattr(args, "use_rope_scaling", False),
        mtp_block_spec=mtp,
    )


def _bert(args, job):
    from megatron.core import parallel_state
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        _config(args, job),
        2,
        bert_layer_local_spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        parallel_output=True,
    )


def _t5(args, job):
    import dataclasses

    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    t5_spec.TENorm = WrappedTorchNorm  # the last norms, which come from Transformer Engine alone
    config = _config(args, job)
    return T5Model(
        dataclasses.replace(config, num_layers=args.decoder_num_layers),
        dataclasses.replace(config, num_layers=args.encoder_num_layers),
        t5_spec.get_t5_encoder_with_local_block_spec(args.encoder_num_layers),
        t5_spec.get_t5_decoder_with_local_block_spec(args.decoder_num_layers),
        args.padded_vocab_size,
        args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        relative_attention_num_buckets=getattr(args, "relative_attention_num_buckets", 32),
        relative_attention_max_distance=getattr(args, "relative_attention_max_distance", 128),
    )


def _llava(args, job):
    """As pretrain_vlm.py builds it: tower and projector have the language model's sizes."""
    from copy import deepcopy

    from megatron.core.activations import fast_gelu, quick_gelu
    from megatron.core.models.multimodal import llava_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision import clip_vit_model, vit_layer_specs
    from megatron.core.transformer.spec_utils import get_submodules
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = clip_vit_model.build_module
    clip_vit_model.build_module = lambda spec, *a, **k: build(
        WrappedTorchNorm if spec is torch.nn.LayerNorm else spec, *a, **k
    )
    config = _config(args, job)
    spec = llava_spec.decoder_model_with_local_default_spec()
    tower, projection = deepcopy(config), deepcopy(config)
    tower.num_layers, tower.vision_model_type = args.encoder_num_layers, "clip"
    tower.pipeline_model_parallel_size = projection.pipeline_model_parallel_size = 1
    if getattr(
        args, "vision_model_type", None
    ):  # as examples/multimodal, whose CLIP has other sizes
        tower.hidden_size, tower.ffn_hidden_size, tower.num_attention_heads = 128, 48, 2
        tower.num_query_groups, tower.kv_channels, tower.activation_func = 2, 64, quick_gelu
        if args.vision_model_type == "siglip":
            tower.vision_model_type, tower.hidden_size, tower.kv_channels = "siglip", 144, 72
            tower.activation_func, tower.layernorm_epsilon = fast_gelu, 1e-6
    return LLaVAModel(
        config,
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        tower,
        vit_layer_specs.get_vit_layer_with_local_spec(),
        args.disable_vision_class_token,
        projection,
        deepcopy(get_submodules(spec.submodules.mlp)),
        img_h=args.img_h,
        img_w=args.img_w,
        patch_dim=args.patch_dim,
        language_position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        pixel_shuffle=args.pixel_shuffle,
    )


def _hybrid(args, job):
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm import mamba_mixer

    spec = _hybrid_spec(mamba_mixer)
    return HybridModel(
        _config(args, job),
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="none",
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


def _hybrid_spec(mamba_mixer):
    """Local modules in the places of Transformer Engine's, and a plain scan."""
    from functools import partial

    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    mm = mamba_mixer
    mm.HAVE_MAMBA_SSM = mm.HAVE_EINOPS = True
    from megatron.core.ssm import mamba_context_parallel as mcp

    mcp.HAVE_EINOPS = True
    from megatron.core.models.hybrid import hybrid_block

    hybrid_block.TENorm = WrappedTorchNorm

    class Norm(torch.nn.Module):
        def __init__(
            self, size, eps=1e-5, group_size=None, norm_before_gate=False, device=None, dtype=None
        ):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(size))
            self.eps, self.group_size = eps, group_size

        def forward(self, x, z=None):
            x = x * F.silu(z)
            y = x.view(*x.shape[:-1], -1, self.group_size)
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
            return y.reshape(x.shape) * self.weight

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

            state = self.state_dict(prefix="", keep_vars=True)
            return make_sharded_tensors_for_checkpoint(
                state, prefix, {"weight": 0}, sharded_offsets
            )

    mm.ExtendedRMSNorm = Norm
    mm.RMSNormGated = Norm

    def forward(self, hidden, *_, **__):
        zxbcdt, _ = self.in_proj(hidden)
        x = zxbcdt.transpose(0, 1)
        d, g, h = self.d_inner_local_tp, self.ngroups_local_tp, self.nheads_local_tp
        z, xbc, dt = x.split([d, d + 2 * g * self.d_state, h], -1)
        xbc = F.conv1d(
            xbc.transpose(1, 2),
            self.conv1d_weight,
            self.conv1d_bias,
            padding=self.d_conv - 1,
            groups=xbc.shape[-1],
        )
        xbc = F.silu(xbc[..., : x.shape[1]].transpose(1, 2))
        u, b, c = xbc.split([d, g * self.d_state, g * self.d_state], -1)
        u = u.reshape(*u.shape[:2], h, -1)
        b, c = (t.reshape(*t.shape[:2], g, -1).repeat_interleave(h // g, 2) for t in (b, c))
        dt = F.softplus(dt + self.dt_bias)
        a = -self.A_log.exp()
        state, out = torch.zeros(u.shape[0], h, u.shape[-1], self.d_state), []
        for t in range(u.shape[1]):
            step = dt[:, t, :, None, None]
            state = (
                state * (step * a[:, None, None]).exp()
                + step * u[:, t, ..., None] * b[:, t, :, None]
            )
            out.append((state * c[:, t, :, None]).sum(-1) + self.D[:, None] * u[:, t])
        y = torch.stack(out, 1).flatten(2)
        y = self.norm(y, z)
        return self.out_proj(y.transpose(0, 1))

    mm.MambaMixer.forward = forward
    bda = get_bias_dropout_add
    attention = get_gpt_layer_local_submodules()
    attention.mlp, attention.pre_mlp_layernorm = IdentityOp, IdentityOp
    from megatron.core.transformer.identity_op import IdentityFuncOp

    attention.mlp_bda = IdentityFuncOp
    mlp = partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    mixer = ModuleSpec(
        mm.MambaMixer,
        submodules=mm.MambaMixerSubmodules(
            in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
        ),
    )
    return ModuleSpec(
        HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                MambaLayer,
                submodules=MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=bda),
            ),
            attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(
                MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=WrappedTorchNorm, mlp=mlp, mlp_bda=bda
                ),
            ),
            moe_layer=ModuleSpec(
                TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=WrappedTorchNorm,
                    mlp=get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False),
                    mlp_bda=bda,
                ),
            ),
        ),
    )


def _disturb(model) -> None:
    """Values that no order of experts and no default of a norm leaves unseen."""
    import zlib

    from megatron.core import parallel_state as ps

    for name, p in model.named_parameters():
        at = name, ps.get_pipeline_model_parallel_rank()
        if "embedding" in name or "output_layer" in name:
            continue
        if ".experts." in name and "shared" not in name:
            at += ps.get_expert_model_parallel_rank(), ps.get_expert_tensor_parallel_rank()
        elif getattr(p, "tensor_model_parallel", False):
            at += (ps.get_tensor_model_parallel_rank(),)
        generator = torch.Generator().manual_seed(zlib.crc32(repr(at).encode()))
        p.data += 0.2 * torch.randn(p.shape, generator=generator)
    for name, b in model.named_buffers():
        if name.endswith("expert_bias"):
            b += 0.1 * torch.randn(b.shape, generator=torch.Generator().manual_seed(3))


def _forward(model, config_tokens, labels=None, kind="gpt"):
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    tokens = config_tokens
    position = torch.arange(tokens.shape[1]).expand_as(tokens)
    n = tokens.shape[1]
    mask = torch.ones(1, 1, n, n).tril() < 0.5
    first, last = ps.is_pipeline_first_stage(), ps.is_pipeline_last_stage()
    if not first:
        shape = n, tokens.shape[0], model.config.hidden_size
        x = torch.empty(shape)
        torch.distributed.recv(x, ps.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(x)
    if kind == "bert":
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

        y, _ = model(tokens, torch.ones_like(tokens), tokentype_ids=torch.zeros_like(tokens))
        return gather(y)
    if kind == "llava":
        images = torch.randn(len(tokens), 3, 8, 8, generator=torch.Generator().manual_seed(5))
        length = n - 1 + model.img_seq_len
        mask = torch.ones(1, 1, length, length).tril() < 0.5
        tokens = torch.cat([tokens[:, :3], torch.full_like(tokens[:, :1], -200), tokens[:, 4:]], 1)
        y, _ = model(images, tokens, position, mask)
        return gather_from_tensor_model_parallel_region(y)
    if kind == "t5":
        whole = torch.zeros_like(mask)
        y = model(tokens, tokens.flip(1), whole, mask, whole)
        return gather_from_tensor_model_parallel_region(y)
    y = model(tokens, position, mask, labels=labels)
    if not last:
        torch.distributed.send(y.detach(), ps.get_pipeline_model_parallel_next_rank())
        return None
    return y if labels is not None else gather_from_tensor_model_parallel_region(y)


def _state(model, optimizer=None, job=None, loading=False):
    from megatron.core import parallel_state as ps

    metadata = {"dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
    metadata |= job.get("metadata", {})
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(
            state, is_loading=loading, metadata=metadata
        )
    return state


def _optimizer(model, job):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    o = job["optimizer"]
    dist = o.get("distributed", False)
    # Its loader of states by parameter asks torch's Adam for a step, which only groups have.
    put = DistributedOptimizer._set_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = lambda self, param, tensors: put(
        self, param, {"step": None} | tensors
    )
    ddp = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(use_distributed_optimizer=dist, grad_reduce_in_fp32=True),
        model,
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=o["lr"],
        min_lr=o.get("min_lr", 0.0),
        weight_decay=o["weight_decay"],
        adam_beta1=o["b1"],
        adam_beta2=o["b2"],
        adam_eps=o["eps"],
        clip_grad=o["clip"],
        use_distributed_optimizer=dist,
        bf16=o.get("bf16", False),
        params_dtype=torch.bfloat16 if o.get("bf16") else torch.float32,
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=o["lr"],
        min_lr=o.get("min_lr", 0.0),
        lr_warmup_steps=o.get("warmup", 0) * job["batch"],
        lr_decay_steps=o.get("decay_steps", 100) * job["batch"],
        lr_decay_style=o.get("decay", "constant"),
        start_wd=o["weight_decay"],
        end_wd=o["weight_decay"],
        wd_incr_steps=100 * job["batch"],
        wd_incr_style="constant",
    )
    return ddp, optimizer, scheduler


def _train(ddp, optimizer, scheduler, batches):
    losses = []
    for tokens in batches:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = _forward_loss(ddp, tokens)
        loss.backward()
        ddp.finish_grad_sync()

        optimizer.step()
        scheduler.step(increment=tokens.shape[0])
        losses.append(float(loss))
    return losses


def _forward_loss(model, tokens):
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    n = inputs.shape[1]
    position = torch.arange(n).expand_as(inputs)
    mask = torch.ones(1, 1, n, n).tril() < 0.5
    return model(inputs, position, mask, labels=labels).float().mean()


def _write_by_rank(job, args, model) -> None:
    """Saves what this rank has as Megatron's format `torch` does: megatron/training/checkpointing.py."""
    from megatron.core import parallel_state as ps

    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    if job["pp"] > 1:
        name += f"_{ps.get_pipeline_model_parallel_rank():03d}"
    if job["ep"] > 1:
        name += f"_{ps.get_expert_model_parallel_rank():03d}"
    sizes = {f"{axis}_model_parallel_size": job[axis[0] + "p"] for axis in ("tensor", "pipeline")}
    sizes |= {"expert_model_parallel_size": job["ep"]}
    sizes |= {"expert_tensor_parallel_size": model.config.expert_tensor_parallel_size}
    state = {"args": argparse.Namespace(**vars(args) | sizes), "iteration": 7}
    state |= {"checkpoint_version": 3.0, "model": model.state_dict_for_save_checkpoint()}
    if job.get("in_8_bits"):
        state["model"] = _in_8_bits(state["model"])
    folder = Path(job["write_by_rank"]) / name
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / "model_optim_rng.pt")


class _Rebuilt:
    """Pickled as what a function of Transformer Engine rebuilds, which is not there."""

    def __init__(self, module: str, name: str, args: tuple):
        self.module, self.name, self.args = module, name, args

    def __reduce__(self):
        for end in range(1, len(parts := self.module.split(".")) + 1):
            sys.modules.setdefault(".".join(parts[:end]), types.ModuleType("none"))
        made = type(self.name, (), {"__module__": self.module, "__qualname__": self.name})
        made = vars(sys.modules[self.module]).setdefault(self.name, made)
        return made, self.args


def _in_8_bits(model: dict) -> dict:
    """Linear weights as Transformer Engine holds them, each in a form of its own; the weights of
    the model become their values."""
    found, tensor = {}, "transformer_engine.pytorch.tensor"
    number = _Rebuilt("transformer_engine_torch", "DType", (7,))
    for name, x in model.items():
        kind = name.split(".")[-2] if name.endswith(".weight") else ""
        found[name] = x
        if not kind.startswith("linear_"):
            continue
        axes = (1,) if kind == "linear_fc2" else (0, 1)  # of up to 128 entries with one scale
        scale = (x.abs().amax(axes, keepdim=True) / 448).float()
        bits = (x / scale).to(torch.float8_e4m3fn)
        x.copy_(bits.float() * scale)
        bits = bits.view(torch.uint8)
        if kind in ("linear_qkv", "linear_proj"):
            turned = bits.T.contiguous() if kind == "linear_proj" else None
            own = None if kind == "linear_proj" else bits
            args = own, number, scale.reshape(1), x.dtype, x.shape, turned
            module = "float8_tensor"
        else:
            scales = F.pad(scale.T if kind == "linear_fc2" else scale, (0, -scale.shape[0] % 4))
            args = x.shape, bits, scales.contiguous(), None, None, number, x.dtype, None
            args += kind != "linear_fc2", None
            module = "float8_blockwise_tensor"
        function = f"_make_{module}_in_reduce_ex"
        found[name] = _Rebuilt(f"{tensor}.{module}", function, args)
    return found


def _run(job, args, model) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps

    found = {}
    ddp = optimizer = scheduler = None
    if "optimizer" in job:
        model = model.bfloat16() if job["optimizer"].get("bf16") else model
        ddp, optimizer, scheduler = _optimizer(model, job)
    own = ddp.module if ddp is not None else model
    common = {"args": args, "checkpoint_version": 3.0, "iteration": job.get("iteration", 7)}
    if "read" in job:
        metadata = dist_checkpointing.load_content_metadata(job["read"])
        own_job = job | ({"metadata": metadata} if metadata else {})
        if optimizer is not None:  # torch's Adam has state after a step alone
            still = SimpleNamespace(step=lambda increment: None)
            _train(ddp, optimizer, still, torch.tensor(job["then"])[:1])
        state = _state(own, optimizer, own_job, loading=True)
        if scheduler is not None:
            state["opt_param_scheduler"] = scheduler.state_dict()
        loaded = dist_checkpointing.load(
            state, job["read"], strict=job.get("strict", "assume_ok_unexpected")
        )
        found["iteration"] = loaded["iteration"]
        found["args"] = len(vars(loaded["args"]))
        own.load_state_dict(loaded["model"])
        if optimizer is not None:
            optimizer.load_state_dict(loaded["optimizer"])
            for own_optimizer in optimizer.chained_optimizers:
                for kept in own_optimizer.optimizer.state.values():
                    kept["step"] = kept["step"].clone()  # else one tensor of all, for torch's Adam
            scheduler.load_state_dict(loaded["opt_param_scheduler"])
            masters = [p for group in optimizer.param_groups for p in group["params"]]
            found["masters"] = sum(float(p.double().abs().sum()) for p in masters)
            found["samples"] = scheduler.num_steps
            found["consumed"] = loaded["args"].consumed_train_samples
    tokens = torch.tensor(job["tokens"])
    rank = ps.get_data_parallel_rank()
    if job.get("train"):
        batches = torch.tensor(job["train"])
        found["losses_before"] = _train(ddp, optimizer, scheduler, batches)
    if "write" in job:
        state = common | _state(own, optimizer, job)
        if scheduler is not None:
            state["opt_param_scheduler"] = scheduler.state_dict()
        if torch.distributed.get_rank() == 0:
            Path(job["write"]).mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state, job["write"], content_metadata=job.get("metadata") or None)
    if "write_by_rank" in job:
        _write_by_rank(job, args, own)
    own.eval()
    with torch.no_grad():
        logits = _forward(own, tokens, kind=job.get("kind", "gpt"))
    own.train()
    if logits is not None:
        found["logits"] = logits.float().numpy()
    if job.get("then"):
        found["losses_after"] = _train(ddp, optimizer, scheduler, torch.tensor(job["then"]))
    if ps.is_pipeline_last_stage() and ps.get_tensor_model_parallel_rank() == 0 and rank == 0:
        np.savez(job["result"], **found)


if __name__ == "__main__":
    main(sys.argv[1])
