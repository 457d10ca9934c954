"""Optimizers by name: each equals plain optax, and what is not elementwise is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mjax.config import dump, load
from mjax.config.rules.mesh_rules import mesh_sizes
from mjax.config.schema.run import OptimizerConfig
from mjax.errors import UserError
from mjax.models import definition_of
from mjax.optim.build import Optimizer
from mjax.optim.transformation import transformation_of
from mjax.plan.memory import bytes_per_device
from mjax.sharding.spec import ParamSpec, count_parameters, freeze
from tests.unit.optim.test_optim import SPECS, is_spec, max_error, random_tree

MOCK = ["data.mock=true"]
DECAY, STEPS = 0.1, 6


def rate(count: jax.Array | int) -> jax.Array | float:
    return 1e-2 / (count + 1)


def trained(cfg: OptimizerConfig) -> tuple[dict, dict]:
    optimizer = Optimizer(cfg, SPECS)
    params = random_tree(0)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for i in range(STEPS):
        grads = random_tree(i + 1)
        params, state = update(grads, state, params, lr=rate(i), weight_decay=DECAY)
    return params, state


def trained_by_optax(core: optax.GradientTransformation) -> dict:
    roles = OptimizerConfig().weight_decay_roles
    mask = jax.tree.map(lambda spec: spec.role in roles, SPECS, **is_spec)
    decay = optax.add_decayed_weights(DECAY, mask)
    chain = optax.chain(core, decay, optax.scale_by_learning_rate(rate))
    params = random_tree(0)
    state = chain.init(params)
    for i in range(STEPS):
        updates, state = chain.update(random_tree(i + 1), state, params)
        params = optax.apply_updates(params, updates)
    return params


EQUAL = {
    "sgd": ("optax.sgd", {}, optax.identity()),
    "momentum": (
        "optax.sgd",
        {"momentum": 0.9, "nesterov": True},
        optax.trace(0.9, nesterov=True),
    ),
    "lion": ("optax.lion", {"b1": 0.95, "b2": 0.98}, optax.scale_by_lion(0.95, 0.98)),
    "adabelief": ("optax.adabelief", {"b2": 0.99}, optax.scale_by_belief(b2=0.99)),
    "rmsprop": (
        "optax.rmsprop",
        {"decay": 0.8, "momentum": 0.5},
        optax.chain(optax.scale_by_rms(0.8), optax.trace(0.5)),
    ),
    "adagrad": ("optax.adagrad", {}, optax.scale_by_rss(eps=1e-7)),
    "amsgrad": ("optax.amsgrad", {}, optax.scale_by_amsgrad()),
    "core": ("optax.scale_by_lion", {}, optax.scale_by_lion()),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equals_plain_optax_with_schedule_and_decay_by_role(name):
    function, args, core = EQUAL[name]
    params, _ = trained(OptimizerConfig(name=function, args=args))
    want = trained_by_optax(core)
    assert max_error(params, want) < 1e-6
    assert max_error(params, random_tree(0)) > 1e-3


def test_lion_s_own_decay_is_the_same_as_ours():
    roles = OptimizerConfig().weight_decay_roles
    mask = jax.tree.map(lambda spec: spec.role in roles, SPECS, **is_spec)
    lion = optax.lion(rate, weight_decay=DECAY, mask=mask)
    want = random_tree(0)
    state = lion.init(want)
    for i in range(STEPS):
        updates, state = lion.update(random_tree(i + 1), state, want)
        want = optax.apply_updates(want, updates)
    assert max_error(trained(OptimizerConfig(name="optax.lion"))[0], want) < 1e-6


@pytest.mark.parametrize(
    ("name", "args", "moments", "numbers"),
    [
        ("optax.sgd", {}, [], []),
        ("optax.sgd", {"momentum": 0.9}, ["trace"], []),
        ("optax.lion", {}, ["mu"], ["count"]),
        ("optax.adabelief", {}, ["mu", "nu"], ["count"]),
        ("optax.amsgrad", {}, ["mu", "nu", "nu_max"], ["count"]),
    ],
)
def test_the_state_holds_its_moments_by_name_and_each_is_counted(name, args, moments, numbers):
    cfg = OptimizerConfig(name=name, args=args)
    state = Optimizer(cfg, SPECS).init(random_tree(0))
    assert sorted(set(state) - {"count", "numbers"}) == moments
    assert list(state.get("numbers", {})) == numbers
    shapes = jax.tree.map(lambda spec: spec.shape, SPECS, **is_spec)
    for moment in moments:
        assert jax.tree.map(jnp.shape, state[moment]) == shapes
    full = load(None, [*MOCK, f"optimizer.name={name}"])
    full = full.model_copy(update={"optimizer": cfg.model_copy(update={"offload": False})})
    specs = definition_of(full.model).specs
    assert mesh_sizes(full.mesh, 1)["dp"] == 1
    need = bytes_per_device(full, full.mesh, 1, specs)
    assert need["moments"] == 4 * len(moments) * count_parameters(specs)


def test_muon_keeps_no_second_moment_of_matrices():
    full = load(None, [*MOCK, "optimizer.name=muon", "optimizer.offload=false"])
    specs = definition_of(full.model).specs
    leaves = jax.tree.leaves(specs, **is_spec)
    matrices = sum(spec.size for spec in leaves if spec.role == "matrix")
    need = bytes_per_device(full, full.mesh, 1, specs)
    assert need["moments"] == 8 * count_parameters(specs) - 4 * matrices > 0


def test_frozen_parameters_have_no_moments():
    full = load(None, [*MOCK, "optimizer.offload=false"])
    specs = definition_of(full.model).specs
    tables = sum(spec.size for spec in jax.tree.leaves(specs, **is_spec) if spec.role != "matrix")
    need = bytes_per_device(full, full.mesh, 1, freeze(specs, ["matrix"]))
    assert need["moments"] == 8 * tables


def test_moments_that_begin_at_other_numbers_do():
    cfg = OptimizerConfig(name="optax.adagrad", args={"initial_accumulator_value": 0.25})
    optimizer = Optimizer(cfg, SPECS)
    for state in (optimizer.init(random_tree(0)), optimizer.first_values()):
        (moment,) = set(state) - {"count", "numbers"}
        assert {float(x) for leaf in jax.tree.leaves(state[moment]) for x in np.ravel(leaf)} == {
            0.25
        }


def test_bf16_moments_by_name():
    cfg = OptimizerConfig(name="optax.adabelief", mu_dtype="bfloat16", stochastic_rounding=True)
    params, state = trained(cfg)
    assert {x.dtype for x in jax.tree.leaves(state["mu"])} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(state["nu"])} == {jnp.dtype(jnp.float32)}
    exact = trained(OptimizerConfig(name="optax.adabelief"))[0]
    assert 0 < max_error(params, exact) < 0.05 * max_error(exact, random_tree(0))
    cfg = OptimizerConfig(name="optax.lion", nu_dtype="bfloat16")
    with pytest.raises(
        UserError, match=r"optimizer.nu_dtype='bfloat16' has no effect: .* keeps mu"
    ):
        transformation_of(cfg)


def test_a_step_that_is_not_kept_leaves_numbers_and_moments_alone():
    optimizer = Optimizer(OptimizerConfig(name="optax.lion"), SPECS)
    params = random_tree(0)
    state = optimizer.init(params)
    step = {"lr": 0.1, "weight_decay": 0.1}
    new = optimizer.update(random_tree(1), state, params, keep=False, **step)
    assert max_error(new[0], params) == 0 == max_error(new[1], state)
    _, state = optimizer.update(random_tree(1), state, params, **step)
    assert state["numbers"]["count"] == 1 == state["count"]


@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        ("optax.lamb", {}, "is not elementwise"),
        ("optax.lars", {}, "is not elementwise"),
        ("optax.fromage", {}, "is not elementwise"),
        ("optax.adafactor", {}, "is not elementwise"),
        (
            "optax.adafactor",
            {"multiply_by_parameter_scale": False, "clipping_threshold": None},
            "is not elementwise",
        ),
        ("optax.sm3", {}, "is not elementwise"),
        ("optax.novograd", {}, "is not elementwise"),
        ("optax.noisy_sgd", {}, "is not elementwise"),
        ("optax.polyak_sgd", {}, "on gradients and parameters alone"),
        ("optax.lbfgs", {}, "on gradients and parameters alone"),
        ("optax.rprop", {}, "its learning rate is not a factor"),
        ("optax.centralize", {}, "is not elementwise"),
        ("optax.clip_by_global_norm", {"max_norm": 1.0}, "is not elementwise"),
        ("optax.contrib.muon", {}, "is not elementwise"),
        ("optax.scale_by_adam", {"eps": 0.0}, "zero and has no gradient"),
    ],
)
def test_what_is_not_elementwise_is_refused_in_one_line(name, args, why):
    with pytest.raises(UserError, match=why) as refusal:
        transformation_of(OptimizerConfig(name=name, args=args))
    line = str(refusal.value)
    assert name in line and "optax.lion" in line and "\n" not in line


def test_a_state_that_depends_on_the_parameter_s_shape_is_refused():
    """A number for each row of long parameters only: small ones do not show it."""
    lion = transformation_of(OptimizerConfig(name="optax.lion"))

    def init(param):
        rows = param.shape[:1] if param.ndim and param.shape[0] > 100 else param.shape
        return optax.ScaleByLionState(jnp.zeros((), jnp.int32), jnp.zeros(rows))

    odd = type(lion)(
        "optax.odd",
        optax.GradientTransformation(init, lion.inner.update),
        1.0,
        jax.tree.structure(init(jnp.zeros((4, 6)))),
        lion.leaves,
    )
    odd.require_shape((4, 6))
    with pytest.raises(UserError, match=r"of shape \(128, 4\) it keeps a state of \(128,\)"):
        odd.require_shape((128, 4))
    spec = ParamSpec((128, 4), ("embed", "mlp"), "matrix")
    Optimizer(OptimizerConfig(name="optax.lion"), {"w": spec})


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["optimizer.name=sgd"], ["optimizer.name='sgd' is no optimizer", "mean optax.sgd?"]),
        (["optimizer.name=optax.lin"], ["(did you mean optax.lion?)"]),
        (["optimizer.name=optax.apply_updates"], ["is no optimizer"]),
        (["optimizer.name=optax.chain"], ["is no optimizer"]),
        (
            ["optimizer.name=optax.lion", "optimizer.args.momentum=0.9"],
            ["optimizer.args.momentum=0.9: optax.lion has no such argument but b1, b2"],
        ),
        (
            ["optimizer.name=optax.lion", "optimizer.args.b1=high"],
            ["optimizer.args.b1='high' of optax.lion must be a number"],
        ),
        (
            ["optimizer.name=optax.sgd", "optimizer.args.nesterov=1"],
            ["optimizer.args.nesterov=1 of optax.sgd must be true or false"],
        ),
        (
            ["optimizer.name=optax.lion", "optimizer.args.learning_rate=1.0"],
            ["args.learning_rate=1.0 has a key of mjax's own, schedule.lr; set that key"],
        ),
        (
            ["optimizer.name=optax.sgd", "optimizer.args.accumulator_dtype=bfloat16"],
            ["mjax's own, optimizer.mu_dtype"],
        ),
        (["optimizer.name=optax.trace"], ["optimizer.args={} lacks decay, which", "optax.trace"]),
        (["optimizer.name=optax.lion", "optimizer.b1=0.5"], ["optimizer.b1=0.5 has no effect"]),
        (["optimizer.args.b1=0.5"], ["no effect with optimizer.name='adamw'"]),
        (["optimizer.args.b1=[1]"], ["optimizer.args.b1=[1]", "valid number"]),
    ],
)
def test_what_is_wrong_in_the_config_is_one_line_with_key_value_and_remedy(overrides, parts):
    with pytest.raises(UserError) as refusal:
        load(None, [*MOCK, *overrides])
    line = str(refusal.value)
    assert "\n" not in line
    for part in parts:
        assert part in line, line


def test_args_survive_printing(tmp_path):
    cfg = load(
        None, [*MOCK, "optimizer.name=optax.sgd", "optimizer.args={momentum: 0.9, nesterov: true}"]
    )
    file = tmp_path / "printed.yaml"
    file.write_text(dump(cfg))
    assert load(file) == cfg
    assert load(file, ["optimizer.args.momentum=null"]).optimizer.args["momentum"] is None
