"""TRL sends weights to a vLLM server by its own client: names, dtypes, shapes and bits.

vLLM needs a GPU. In its place are a session that records requests, and a communicator that records tensors.
"""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import zeroamp
from tests.models.adapters import quietly
from tests.processes.trl_training import Case, build, silence
from zeroamp.integrations.peft import iter_merged_weights

pytest.importorskip("trl", reason="trl is not installed: its client is tested")


def _client():
    """TRL's client, without the connection to vLLM's workers. Every request is answered."""
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient.__new__(VLLMClient)
    client.session, client.base_url = mock.Mock(), "http://server"
    client.session.post.return_value.status_code = 200
    client.communicator, client._updating_weights = "group", False
    return client


def _generation(trainer, client):
    """TRL's object that sends the weights, in server mode."""
    from trl.generation.vllm_generation import VLLMGeneration

    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.model, generation.accelerator = trainer.model, trainer.accelerator
    generation.mode, generation.enable_sleep_mode = "server", False
    generation._weight_metadata, generation.vllm_client = None, client
    return generation


def _reward(completions, **_):
    return [len(set(text)) / 10 for text in completions]


@quietly
def _sent(lora, folder):
    """Train a step of GRPO at stage 3 and send. Return {path: body} of the requests, and the tensors that differ."""
    from trl.generation import vllm_client

    silence()
    case = Case(trainer="GRPOTrainer", lora={"r": 4} if lora else None)
    trainer = build(case, 3, folder, reward=_reward, num_generations=2, max_steps=1, max_completion_length=4)
    trainer.train()
    tensors, engine, client = {}, mock.Mock(), _client()
    engine.trainer_send_weights = lambda iterator, trainer_args: tensors.update(
        (name, tensor.clone()) for name, tensor in iterator
    )
    names = {"NCCLWeightTransferEngine": engine, "NCCLTrainerSendWeightsArgs": mock.Mock()}
    with mock.patch.multiple(vllm_client, create=True, **names):
        trainer.vllm_generation = _generation(trainer, client)
        trainer.vllm_generation.sync_weights()
    if lora:
        expected = dict(iter_merged_weights(trainer.model))
    else:
        zeroamp.export_hf(trainer.model, Path(folder) / "export", "bf16")
        dist.barrier()
        expected = load_file(Path(folder) / "export" / "model.safetensors")
    requests = {call.args[0].removeprefix("http://server"): call.kwargs for call in client.session.post.call_args_list}
    if dist.get_rank() > 0:
        return list(requests), sorted(tensors)
    info = requests["/update_weights"]["json"]["update_info"]
    announced = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
    assert sorted(announced) == sorted((name, "bfloat16", list(tensor.shape)) for name, tensor in expected.items())
    differing = [name for name, tensor in expected.items() if not torch.equal(tensors.pop(name), tensor)]
    return list(requests), [*differing, *tensors]


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_the_server_gets_the_weights_that_an_export_writes(ranks2, tmp_path, lora):
    pytest.importorskip("peft", reason="peft is not installed: it makes the adapters")
    calls = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
    assert ranks2.run(_sent, lora, str(tmp_path)) == [(calls, []), ([], [])]
