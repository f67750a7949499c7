"""Fine-tune a LLaMA in two pipeline stages: torch's schedules beside zeroamp's ZeRO stages, dtypes and sums.

    torchrun --nproc-per-node 4 examples/pipeline.py

Two ranks have the first half of the layers, and two the second half. Each pair is sharded by zeroamp. docs/pipelines.md
says what is sent when.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from _data import pack, read_documents, training_batches
from _launch import start_process_group
from _weights import load_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import PreTrainedModel

import zeroamp

NUM_STAGES = 2
MICRO_BATCH_SIZE = 2  # sequences
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},  # at stage 3, each micro-batch gathers the weights twice
}


class Part(nn.Module):
    """The layers of one stage. The names of its parameters are those of the whole model."""

    def __init__(self, whole: PreTrainedModel, stage: int) -> None:
        super().__init__()
        is_first, is_last = stage == 0, stage == NUM_STAGES - 1
        layers = list(enumerate(whole.model.layers))
        own = layers[len(layers) * stage // NUM_STAGES : len(layers) * (stage + 1) // NUM_STAGES]
        self.model = nn.Module()
        self.model.embed_tokens = whole.model.embed_tokens if is_first else None
        self.model.layers = nn.ModuleDict({str(index): layer for index, layer in own})
        self.model.norm = whole.model.norm if is_last else None
        self.rotary = whole.model.rotary_emb
        self.lm_head = whole.lm_head if is_last else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states for the next stage, or the logits. The first stage gets token ids."""
        if self.model.embed_tokens is not None:
            hidden = self.model.embed_tokens(hidden)
        positions = self.rotary(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])
        for layer in self.model.layers.values():
            hidden = layer(hidden, position_embeddings=positions)
        return hidden if self.lm_head is None else self.lm_head(self.model.norm(hidden))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of one micro-batch. Outputs of a wrapped part are fp32."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    """Train, and save the parts as one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny (random), a folder, or a hub name")
    parser.add_argument("--schedule", default="1F1B", choices=SCHEDULES, help="with one part per rank")
    parser.add_argument("--micro-batches", type=int, default=4, help="per optimizer step and rank")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline"), help="folder for the checkpoint")
    args = parser.parse_args()
    device = start_process_group(timedelta(minutes=5))
    mesh = init_device_mesh(device.type, (NUM_STAGES, dist.get_world_size() // NUM_STAGES), mesh_dim_names=("pp", "dp"))
    stages, data = mesh["pp"], mesh["dp"]
    stage = stages.get_local_rank()

    whole, tokenizer = load_model(args.model, seed=0)
    is_tied = whole.lm_head.weight is whole.model.embed_tokens.weight
    policy = zeroamp.policy_from_config(CONFIG, world_size=data.size())
    part = zeroamp.wrap_model(Part(whole, stage), policy, data, auto_wrap_policy={"LlamaDecoderLayer"})
    tied = part.lm_head if stage else part.model.embed_tokens
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-4)
    train = zeroamp.PipelineStep([part], optimizer)
    pipeline_stage = PipelineStage(part, stage, NUM_STAGES, device, group=stages.get_group())
    schedule = SCHEDULES[args.schedule](pipeline_stage, args.micro_batches, loss_fn=train.wrap_loss(loss_of))

    rows = pack(read_documents(None, tokenizer), tokenizer, seq_len=args.seq_len, name="training")
    num_rows = args.micro_batches * MICRO_BATCH_SIZE
    own = range(data.get_local_rank(), data.get_local_rank() + 1)
    batches = training_batches(rows, micro_batch_size=num_rows, indices=own, world_size=data.size(), seed=0)
    for _ in range(args.steps):
        tokens = next(batches).to(device)
        if stage == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=tokens)
        if is_tied:
            zeroamp.sum_tied_gradients(tied.weight, NUM_STAGES - 1 - stage, stages.get_group())
        report = train.step()
        if dist.get_rank() == 0:
            print(report, flush=True)
    zeroamp.save_checkpoint(args.out, train.model, train)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
