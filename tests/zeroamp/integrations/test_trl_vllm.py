"""TRL sends weights to a vLLM server by its own client: names, dtypes, shapes and bits, on a stub of the server.

vLLM needs a GPU. In its place are a server that records requests, and a communicator that records tensors.
"""

import http.server
import json
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import zeroamp
from tests.models.adapters import quietly
from tests.processes.trl_training import Case, classes, llama, silence, tokenizer
from zeroamp.integrations.peft import iter_merged_weights

pytest.importorskip("trl", reason="trl is not installed: its client is tested")


class _Server(http.server.ThreadingHTTPServer):
    """Answers every request with {"success": true}."""

    def __init__(self):
        self.requests = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.path, json.loads(body) if body else None))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"success": true}')

    def log_message(self, *_):
        pass


@contextmanager
def _server():
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _client(url):
    """TRL's client, without the connection to vLLM's workers."""
    import requests
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient.__new__(VLLMClient)
    client.session, client.base_url = requests.Session(), url
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


def _trainer(lora, folder):
    """GRPO on zeroamp at stage 3."""
    import peft
    from accelerate.state import AcceleratorState, GradientState
    from datasets import Dataset

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    case = Case(trainer="GRPOTrainer")
    cls, arguments_cls = classes(case, 3)
    args = arguments_cls(
        output_dir=folder, use_cpu=True, bf16=True, per_device_train_batch_size=2, num_generations=2, max_steps=1,
        learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        max_completion_length=4,
    )  # fmt: skip
    given = {"zeroamp": {"zero_optimization": {"stage": 3}}}
    if lora:
        given["peft_config"] = peft.LoraConfig(task_type="CAUSAL_LM", r=4)
    data = Dataset.from_list([{"prompt": "abc"}, {"prompt": "hg f"}] * 4)

    def reward(completions, **_):
        return [len(set(text)) / 10 for text in completions]

    return cls(llama(case), args=args, train_dataset=data, reward_funcs=reward, processing_class=tokenizer(), **given)


@quietly
def _sent(lora, folder):
    """Return the requests, and which tensors differ from those that an export writes."""
    from trl.generation import vllm_client

    silence()
    trainer = _trainer(lora, folder)
    trainer.train()
    tensors = {}
    engine = mock.Mock()
    engine.trainer_send_weights = lambda iterator, trainer_args: tensors.update(
        (name, tensor.clone()) for name, tensor in iterator
    )
    names = {"NCCLWeightTransferEngine": engine, "NCCLTrainerSendWeightsArgs": mock.Mock()}
    with _server() as server, mock.patch.multiple(vllm_client, create=True, **names):
        trainer.vllm_generation = _generation(trainer, _client(f"http://127.0.0.1:{server.server_port}"))
        trainer.vllm_generation.sync_weights()
    return server.requests, tensors, trainer.model


@quietly
def _compared(lora, folder):
    requests, tensors, model = _sent(lora, folder)
    if lora:
        expected = dict(iter_merged_weights(model))
    else:
        zeroamp.export_hf(model, Path(folder) / "export", "bf16")
        dist.barrier()
        expected = load_file(Path(folder) / "export" / "model.safetensors")
    if dist.get_rank() > 0:
        return [], requests, sorted(tensors)
    differing = [name for name, tensor in expected.items() if not torch.equal(tensors.pop(name), tensor)]
    info = next(body for path, body in requests if path == "/update_weights")["update_info"]
    announced = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
    wanted = [(name, "bfloat16", list(tensor.shape)) for name, tensor in expected.items()]
    assert sorted(announced) == sorted(wanted)
    return [*differing, *tensors], [path for path, _ in requests], []


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_the_server_gets_the_weights_that_an_export_writes(ranks2, tmp_path, lora):
    pytest.importorskip("peft", reason="peft is not installed: it makes the adapters")
    first, other = ranks2.run(_compared, lora, str(tmp_path))
    calls = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
    assert first == ([], calls, [])
    assert other == ([], [], [])
