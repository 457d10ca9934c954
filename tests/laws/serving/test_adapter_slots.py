"""Law: adapters that come and go while a model is served have the numbers of their own model."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.infer.requests import SamplingParams
from mjax.infer.stages.weights_in_stages import arrays_in_stages
from mjax.interop.adapter_slots import AdapterSlots, with_changed
from mjax.interop.adapter_stack import with_stack
from mjax.interop.peft.adapter_writer import write_adapter
from tests.adapters import drawn_adapters
from tests.laws.serving.tiny import served, tiny_engine, tiny_model
from tests.marks import slow


@slow
@pytest.mark.parametrize(
    "mesh, kind, layers",
    [
        (None, "keys and values", 2),
        ({"tp": 2}, "keys and values", 2),
        ({"pp": 2, "tp": 2}, "windows in turn", 4),
        ({"pp": 2}, "keys and values", 3),
    ],
)
def test_slots_are_filled_in_place_without_a_compile(tmp_path, mesh, kind, layers):
    plain = tiny_model(kind, num_hidden_layers=layers)
    cfg, specs = plain.cfg, plain.definition.specs
    folders = {}
    for rank, name in enumerate(("one", "two"), 2):
        folders[name] = tmp_path / name
        of_few = (lambda spec: spec.matmul == "up") if rank == 2 else (lambda spec: spec.matmul)
        write_adapter(folders[name], cfg, specs, drawn_adapters(specs, of_few, rank=rank))
    params = SamplingParams(max_tokens=6)
    wanted = {None: served(tiny_engine(plain), [([7, 8, 9], params)])[0].output}
    for name, folder in folders.items():
        engine = tiny_engine(with_stack(plain, [folder]), adapters=[name])
        own = params.model_copy(update={"adapter": name})
        wanted[name] = served(engine, [([7, 8, 9], own)])[0].output

    slots = AdapterSlots(cfg, specs, 2, 3)
    engine = tiny_engine(slots.beside(plain), mesh)
    programs = None
    for names in ([], ["one"], ["one", "two"], ["two"], []):
        for slot, name in enumerate(folders, 1):
            adapters = slots.read(folders[name]) if name in names else None
            layout = engine.runner.programs.layout
            changed = arrays_in_stages(slots.put(slot, adapters), layout)
            engine.runner.params = with_changed(engine.runner.params, changed)
        engine.adapters = {name: slot for slot, name in enumerate(folders, 1) if name in names}
        asks = [params.model_copy(update={"adapter": name}) for name in (None, *names)]
        for request in served(engine, [([7, 8, 9], ask) for ask in asks]):
            found, own = request.output.outputs[0], wanted[request.params.adapter].outputs[0]
            assert found.token_ids == own.token_ids
            np.testing.assert_allclose(found.logprobs, own.logprobs, rtol=0, atol=1e-5)
        engine.lanes[0].pool.forget()
        programs = programs or set(engine.runner.compiled) if len(names) == 2 else programs
        if len(names) < 2 and programs:
            assert set(engine.runner.compiled) == programs
    with pytest.raises(UserError, match="rank is 3, .* --max-lora-rank 3"):
        AdapterSlots(cfg, specs, 1, 2).read(folders["two"])


@slow
def test_weights_that_are_read_anew_keep_the_slots(tmp_path):
    plain = tiny_model("keys and values")
    cfg, specs = plain.cfg, plain.definition.specs
    write_adapter(tmp_path / "one", cfg, specs, drawn_adapters(specs, rank=2))
    slots = AdapterSlots(cfg, specs, 1, 2)
    slots.put(1, slots.read(tmp_path / "one"))
    other = replace(plain, params=jax.tree.map(lambda p: 1.1 * p, plain.params))
    ask = [([7, 8, 9], SamplingParams(max_tokens=6, adapter="one"))]
    wanted = served(tiny_engine(slots.beside(other), adapters=["one"]), ask)[0].output
    engine = tiny_engine(slots.beside(plain), adapters=["one"])
    engine.update_weights(slots.beside(other).params)
    found = served(engine, ask)[0].output
    assert found.outputs[0].logprobs == wanted.outputs[0].logprobs
