"""What a wrapped model cannot do: each call is an error that names what to do, and leaves the model as it was."""

import copy
import io
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import AveragedModel

import zeroamp
from tests.models.architectures import IDS, t5
from tests.models.small import VOCAB, batch, build, loss_of
from tests.processes.training import SmallTraining, adamw, config, full_parameters, same_bits, wrapped
from zeroamp.planning.mesh import local_part


def _raised(error, call):
    try:
        call()
    except error as raised:
        return str(raised)
    raise AssertionError(f"expected {error.__name__}, got none")


def _calls(model):
    """Name -> (a call that a wrapped model cannot do, what its error says)."""
    return {
        "deepcopy": (lambda: copy.deepcopy(model), "average the shards"),
        "AveragedModel": (lambda: AveragedModel(model), "average the shards"),
        "pickle": (lambda: torch.save(model, io.BytesIO()), "zeroamp.export_hf(model, folder) for its weights"),
        "load": (lambda: model.load_state_dict(build("hf_llama").state_dict()), "set_model_state_dict"),
        "cast": (lambda: model.to(torch.bfloat16), "is stored in fp32 and cannot be cast to bf16"),
        "half": (model.half, "cast to fp16 after wrap_model"),
        "resize": (lambda: model.resize_token_embeddings(VOCAB + 8), "before wrap_model"),
        "save": (lambda: model.save_pretrained("nowhere"), "zeroamp.export_hf"),
        "cast a unit": (model.model.layers[0].double, "model.layers.0.self_attn.q_proj.weight is stored"),
    }


def _refused():
    training = SmallTraining(config(3), adamw, name="hf_llama")
    model, losses = training.model, [training.step().loss]
    texts = {kind: (_raised(zeroamp.WrapError, call), says) for kind, (call, says) in _calls(model).items()}
    model.load_state_dict(model.state_dict())  # of shards
    model.to("cpu").float()  # changes nothing
    losses.append(training.step(1).loss)
    undisturbed = SmallTraining(config(3), adamw, name="hf_llama")
    assert losses == [undisturbed.step(index).loss for index in (0, 1)]
    assert [kind for kind, (text, says) in texts.items() if says not in text] == []


def test_a_refused_call_leaves_the_model_as_it_was(ranks2):
    """A refused call says what to do and leaves the model as it was."""
    ranks2.run(_refused)


def _set_after_a_forward(stage):
    """What set_model_state_dict of whole tensors raises after a forward with gradients; whether the remedy loads."""
    model = wrapped("two_blocks_untied", config(stage))
    whole = {name: tensor + 1 for name, tensor in build("two_blocks_untied").state_dict().items()}
    options = StateDictOptions(full_state_dict=True)

    def load():
        set_model_state_dict(model, dict(whole), options=options)  # puts shards into the dict that it is given

    loss_of(model, batch("two_blocks_untied", 0))
    error = _raised(zeroamp.WrapError, load)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    load()
    return error, same_bits(full_parameters(model), whole)


@pytest.mark.parametrize("stage", [0, 3])
def test_whole_tensors_for_unsharded_parameters_are_refused(ranks2, stage):
    """Whole tensors for parameters that a forward left unsharded are refused by name."""
    for error, differing in ranks2.run(_set_after_a_forward, stage):
        assert "embed.weight, which is unsharded: a forward with gradients has run" in error
        assert differing == []


def _loads_of_saved_ranks(stage, shape, folder, is_rebuilt=False):
    """Save the state dict of each rank by `torch.save`. Return what each raises when this rank loads it, by rank."""
    model = wrapped("two_blocks_untied", config(stage), mesh_shape=shape)
    shards = lambda: {name: local_part(each.detach()).clone() for name, each in model.named_parameters()}  # noqa: E731
    before = shards()
    torch.save({"model": model.state_dict()}, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    errors = {}
    for rank in range(dist.get_world_size()):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        try:
            state_dict = torch.load(folder / f"{rank}.pt", weights_only=True)["model"]
            model.load_state_dict(dict(state_dict) if is_rebuilt else state_dict)
        except zeroamp.WrapError as error:
            errors[rank] = str(error)
            state_dict.clear()  # keeps the note whose shards it had
            model.load_state_dict(state_dict, strict=False)
        else:
            assert same_bits(shards(), before) == []
    return errors


@pytest.mark.parametrize(("stage", "shape"), [(0, None), (3, None)])
def test_shards_that_another_rank_saved_are_refused(ranks2, stage, shape, tmp_path):
    for rank, errors in enumerate(ranks2.run(_loads_of_saved_ranks, stage, shape, tmp_path)):
        assert list(errors) == ([] if stage == 0 else [1 - rank])
        for text in errors.values():
            assert f"(shard {1 - rank} of 2), but this rank has shard {rank} of 2" in text
            assert "zeroamp.save_checkpoint" in text


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_replicas_may_load_the_shards_of_each_other(ranks4, is_rebuilt, tmp_path):
    """`is_rebuilt`: as scripts that make a dict of a state dict, or put it into a dataclass."""
    for rank, errors in enumerate(ranks4.run(_loads_of_saved_ranks, 3, (2, 2), tmp_path, is_rebuilt)):
        assert list(errors) == [each for each in range(4) if each % 2 != rank % 2]


def _called_from_outside():
    training = SmallTraining(config(3))
    model, x = training.model, torch.randn(2, 5, 32)
    texts = [_raised(zeroamp.WrapError, lambda: model.blocks[0](x))]  # before the root's first forward
    training.step()
    texts += [_raised(zeroamp.WrapError, partial(module, x)) for module in (model.blocks[1], model.norm)]
    model.hidden = lambda tokens: model.blocks[0](model.embed(tokens))
    zeroamp.register_forward_method(model, "hidden")
    with torch.no_grad():
        hidden = model.hidden(batch("two_blocks_untied", 0))
    assert hidden.shape == (2, 12, 32)
    loss = training.loss(1)
    with training.train.autocast():  # between forward and backward the root's own parameters are unsharded
        assert torch.isfinite(model.head(x)).all()
    training.train.backward(loss)
    return texts


def test_a_module_called_outside_of_the_forward_is_named(ranks2):
    """A module called outside of the forward is named with the parameter that is sharded."""
    for texts in ranks2.run(_called_from_outside):
        assert [text.split()[0] for text in texts] == ["blocks.0", "blocks.1", "norm"]
        assert "blocks.0.norm1.weight is sharded" in texts[0]
        assert all("zeroamp.register_forward_method(model," in text for text in texts)


def _generate():
    torch.manual_seed(0)
    model = zeroamp.wrap_model(t5()[0], zeroamp.policy_from_config(config(3)))

    def generate():
        with torch.no_grad():
            return model.generate(IDS, max_new_tokens=3, min_new_tokens=3)

    sharded = _raised(zeroamp.WrapError, generate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # T5's blocks return a view
        model(input_ids=IDS, labels=IDS)  # leaves the root unsharded
    without_autocast = _raised(zeroamp.PrecisionError, generate)
    zeroamp.register_forward_method(model, "generate")
    return sharded, without_autocast, generate()


def test_generate_of_an_encoder_decoder_is_registered_first(ranks2):
    """Generate of an encoder decoder works once it is registered and says so before."""
    for *texts, generated in ranks2.run(_generate):
        assert all('zeroamp.register_forward_method(model, "generate")' in text for text in texts)
        torch.manual_seed(0)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(generated, t5()[0].generate(IDS, max_new_tokens=3, min_new_tokens=3))


def _train_step():
    training = SmallTraining(config(3), name="hf_llama")
    lbfgs = torch.optim.LBFGS(list(training.model.parameters()))
    of_lbfgs = _raised(zeroamp.StepError, lambda: zeroamp.TrainStep(training.model, lbfgs))
    inputs = batch("hf_llama", dist.get_rank())
    output = training.model(input_ids=inputs, labels=inputs)
    return of_lbfgs, _raised(zeroamp.StepError, lambda: training.train.backward(output))


def test_what_a_train_step_cannot_do_is_refused_with_the_remedy(ranks2):
    for of_lbfgs, of_output in ranks2.run(_train_step):
        assert "docs/recipes.md" in of_lbfgs
        assert "Pass output.loss" in of_output


class _Lora(nn.Module):
    """A layer of peft, without peft."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.lora = base, nn.Linear(base.in_features, base.out_features)

    def forward(self, x):
        return self.base_layer(x) + self.lora(x)


def _with_adapters(folder):
    model = build("two_blocks_untied")
    model.blocks[0].out = _Lora(model.blocks[0].out)
    zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3)))
    return _raised(zeroamp.CheckpointError, lambda: zeroamp.export_hf(model, folder))


def test_an_export_of_adapters_is_refused_before_anything_is_written(ranks2, tmp_path):
    for text in ranks2.run(_with_adapters, tmp_path / "out"):
        assert "blocks.0.out is a peft module" in text
        assert "export_adapter(model, folder)" in text
    assert not (tmp_path / "out").exists()


class _Router(nn.Module):
    """Casts its weights in each forward, as routers of transformers do, or not."""

    def __init__(self, casts):
        super().__init__()
        self.casts, self.classifier = casts, nn.Linear(8, 4, bias=False)

    def forward(self, x):
        if self.casts:
            self.classifier = self.classifier.to(torch.float32)
        return self.classifier(x.float())


class _Block(nn.Module):
    def __init__(self, casts):
        super().__init__()
        self.router, self.up = _Router(casts), nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.up(x)) + self.router(x).mean()


def _train_routers(casts):
    torch.manual_seed(0)
    cfg = {
        "bf16": {"enabled": True},
        "data_types": {"keep_in_fp32_modules": ["classifier"]},
        "zero_optimization": {"stage": 3},
    }
    model = zeroamp.wrap_model(nn.Sequential(_Block(casts), _Block(casts)), cfg, auto_wrap_policy={"_Block"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_module_may_cast_itself_in_its_forward(ranks2):
    """The classifiers are group holders, unsharded by their block, when the forward casts them to the dtype they have.

    Two of them, because one would share the group of the model.
    """
    assert ranks2.run(_train_routers, True) == ranks2.run(_train_routers, False)
