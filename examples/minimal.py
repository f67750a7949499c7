"""ZeRO-3 with autocast numerics in one page: torchrun --nproc-per-node 2 examples/minimal.py"""

import torch
import torch.distributed as dist
from torch import nn

import zeroamp

CONFIG = {  # a DeepSpeed-style config: a mapping, or the path of a JSON file
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
}


class LanguageModel(nn.Module):
    def __init__(self, vocab=256, width=128):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, nhead=4, dropout=0.0, batch_first=True)
        self.embed, self.blocks = nn.Embedding(vocab, width), nn.TransformerEncoder(layer, num_layers=4)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.head(self.blocks(self.embed(tokens))).flatten(0, 1), tokens.flatten())


dist.init_process_group()
log = print if dist.get_rank() == 0 else lambda *_: None
torch.manual_seed(0)  # the same weights on every rank
model = zeroamp.wrap_model(LanguageModel(), zeroamp.policy_from_config(CONFIG))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=torch.cuda.is_available())  # after wrapping
train = zeroamp.TrainStep(model, optimizer)
log(zeroamp.explain(model))  # which dtype is used where
torch.manual_seed(1 + dist.get_rank())  # other data on every rank
for _ in range(20):
    train.backward(model(torch.randint(0, 256, (8, 32))))  # the forward is under torch.autocast, entered by a hook
    if report := train.step():  # None before the last micro-batch of an optimizer step
        log(f"step {report.step}: loss {report.loss:.3f}, gradient norm {report.grad_norm:.3f}")
dist.destroy_process_group()
