"""A GPT-2 of transformers, whose head is its embedding; it knows no other library.

torchrun --nproc-per-node 2 gpt2.py --deepspeed --deepspeed_config ds.json --out OUT

Each rank writes its losses to OUT/rank-N.json.
"""

import argparse
import json
import os

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = deepspeed.add_config_arguments(parser).parse_args()

deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
torch.manual_seed(0)
sizes = {"vocab_size": 96, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
tokens = {"bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **tokens))
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=args.deepspeed_config
)
batches = torch.randint(96, (20, 2, 4, 16), generator=torch.Generator().manual_seed(5))
seen = []
for batch in batches:
    loss = engine(input_ids=batch[rank], labels=batch[rank]).loss
    engine.backward(loss)
    engine.step()
    seen.append(loss.item())
with open(os.path.join(args.out, f"rank-{rank}.json"), "w") as file:
    json.dump(seen, file)
