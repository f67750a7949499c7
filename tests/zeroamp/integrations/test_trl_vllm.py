"""TRL sends weights to a vLLM server by its own client: names, dtypes, shapes and bits, on a stub of the server.

vLLM needs a GPU. In its place are a server that records requests, and a communicator that records tensors.
"""

import http.server
import json
import threading
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.models.adapters import merged, quietly
from tests.processes.training import full_parameters
from tests.processes.trl_training import Case, build, silence

pytest.importorskip("trl", reason="trl is not installed: its client is tested")


@contextmanager
def _server():
    """Yield the URL of a server that answers every request with {}, and the list of its (path, body)."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            requests.append((self.path, json.loads(body) if body else None))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()


def _client(url):
    """TRL's client, without the connection to vLLM's workers."""
    from requests import Session
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient.__new__(VLLMClient)
    client.session, client.base_url = Session(), url
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


@quietly
def _compared(lora, folder):
    """Return the tensors that differ from those that an export writes, the paths of the requests, and what is left."""
    from trl.generation import vllm_client

    silence()
    case = Case(trainer="GRPOTrainer", lora={"r": 4} if lora else None)
    sizes = {"num_generations": 2, "max_steps": 1, "max_completion_length": 4}
    trainer = build(
        case, 3, folder, reward=lambda completions, **_: [len(set(text)) / 10 for text in completions], **sizes
    )
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        if ".lora_B." in name:  # else so small that a merge changes nothing in bf16
            parameter.detach().to_local().fill_(0.1)
    tensors, engine = {}, mock.Mock()
    engine.trainer_send_weights = lambda iterator, trainer_args: tensors.update(
        (name, tensor.clone()) for name, tensor in iterator
    )
    names = {"NCCLWeightTransferEngine": engine, "NCCLTrainerSendWeightsArgs": mock.Mock()}
    with _server() as (url, requests), mock.patch.multiple(vllm_client, create=True, **names):
        trainer.vllm_generation = _generation(trainer, _client(url))
        trainer.vllm_generation.sync_weights()
    expected = merged(full_parameters(trainer.model), scaling=2)  # peft's lora_alpha of 8 / r
    if dist.get_rank() > 0:
        return [], requests, sorted(tensors)
    differing = [name for name, tensor in expected.items() if not torch.equal(tensors.pop(name), tensor)]
    info = next(body for path, body in requests if path == "/update_weights")["update_info"]
    announced = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
    wanted = [(name, "bfloat16", list(tensor.shape)) for name, tensor in expected.items()]
    assert sorted(announced) == sorted(wanted)
    return [*differing, *tensors], [path for path, _ in requests], []


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_the_server_gets_the_whole_weights_with_adapters_merged(ranks2, tmp_path, lora):
    pytest.importorskip("peft", reason="peft is not installed: it makes the adapters")
    first, other = ranks2.run(_compared, lora, str(tmp_path))
    calls = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
    assert first == ([], calls, [])
    assert other == ([], [], [])
