"""Fine-tune a Llama with LoRA, calling `loss.backward()`: from Python's source to its manual.

python examples/finetune_eager.py                                  # one process
torchrun --nproc_per_node 2 examples/finetune_eager.py --stage 3   # two ranks, sharded

Nothing is downloaded: a small base model learns the standard library's source code first. Then it
is frozen, and adapters teach it the English of the language reference, which pydoc brings along.
"""

import argparse
import math
import os
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import fzero

cli = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
cli.add_argument("--stage", type=int, default=3, help="ZeRO stage, 0 to 3")
cli.add_argument("--precision", choices=["bf16"], help="float32 if not given")
cli.add_argument("--accum", type=int, default=2, help="micro-batches per step")
cli.add_argument("--base-steps", type=int, default=200, help="of the base model")
cli.add_argument("--steps", type=int, default=150, help="of the adapters")
cli.add_argument("--size", default="small", choices=["tiny", "small"])
cli.add_argument("--batch", type=int, default=4, help="windows per rank and micro-batch")
cli.add_argument("--rank", type=int, default=8, help="of the adapters' matrices")
cli.add_argument("--reentrant", action="store_true", help="the other kind of checkpointing")
cli.add_argument("--seed", type=int, default=0)
cli.add_argument("--out", type=Path, default=Path("runs/finetune_eager"))
args = cli.parse_args()
rank, local_rank, world = (
    int(os.environ.get(name, default))
    for name, default in [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)]
)
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
context, (width, depth) = 128, {"tiny": (32, 2), "small": (128, 4)}[args.size]

# ---- data: code for the base model, prose for the adapters; a tenth of the prose is kept ----
stdlib = Path(sysconfig.get_path("stdlib"))
code = b"".join(path.read_bytes() for path in sorted(stdlib.glob("*.py")))
pages = [topics[name].encode() for name in sorted(topics)]


def windows_of(text: bytes) -> Tensor:
    """Every run of `context` bytes, as a view: (windows, context), uint8."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context, 1)


source = windows_of(code)
prose = windows_of(b"\n".join(page for i, page in enumerate(pages) if i % 10))
valid = windows_of(b"\n".join(pages[::10]))
valid = valid[torch.linspace(0, len(valid) - 1, 128).long()].long().to(device)
my_draws = torch.Generator().manual_seed(args.seed * world + rank)


# ---- model: byte-level, small, and only what is trained has an optimizer state ----
class LoRA(nn.Module):
    """A frozen linear layer, and a trained update of low rank (Hu et al., arXiv:2106.09685)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, args.rank, bias=False, device=device)
        self.up = nn.Linear(args.rank, linear.out_features, bias=False, device=device)
        nn.init.zeros_(self.up.weight)  # it starts as the base model

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 2 * self.up(self.down(x))


def build_base() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 32,
        max_position_embeddings=4 * context,
        initializer_range=0.06,  # such a narrow model learns faster than from 0.02
        use_cache=False,  # of keys and values, while it trains
    )
    torch.manual_seed(args.seed)  # the same model on every rank
    with device:
        model = LlamaForCausalLM(config)
    model.activation_checkpointing_enable({"use_reentrant": args.reentrant})
    return model


def add_adapters(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.requires_grad_(False)
    for name, module in [*model.model.layers.named_modules()]:
        if isinstance(module, nn.Linear):
            model.model.layers.set_submodule(name, LoRA(module))
    return model


# ---- training ----
def bits_per_byte(engine: fzero.Engine) -> float:
    engine.eval()
    with torch.no_grad():  # every rank the same batches: parameters come block by block
        losses = [engine(input_ids=x, labels=x).loss for x in valid.split(32)]
    engine.train()
    return torch.stack(losses).mean().item() / math.log(2)


def train(model: LlamaForCausalLM, text: Tensor, steps: int, lr: float, title: str) -> fzero.Engine:
    opt = fzero.optim.adamw(fzero.optim.warmup_cosine(lr, steps // 20, steps), b2=0.95)
    cfg = fzero.Config(args.stage, precision=args.precision, accum_steps=args.accum, clip_norm=1.0)
    engine = fzero.Engine(model, opt, cfg)
    for _ in (bar := tqdm(range(steps), title, mininterval=1, disable=rank > 0)):
        for _ in range(args.accum):
            drawn = torch.randint(len(text), (args.batch,), generator=my_draws)
            x = text[drawn].long().to(device)
            engine(input_ids=x, labels=x).loss.backward()  # with fp16: engine.backward(loss)
        engine.step()
        metrics = engine.state[1].metrics  # the same on every rank
        bits = metrics["loss"].item() / math.log(2)
        bar.set_postfix(bits=f"{bits:.3f}", norm=f"{metrics['grad_norm']:.2f}", refresh=False)
    return engine


base = train(build_base(), source, args.base_steps, 4e-3, "base model, code")
before = bits_per_byte(base)
model = build_base()
model.load_state_dict(base.state_dict())  # every rank takes part
engine = train(add_adapters(model), prose, args.steps, 4e-3, "adapters, prose")
after = bits_per_byte(engine)

# ---- what came out ----
weights = engine.full_params()  # every rank takes part
with engine.eval().local_forward():  # each rank writes until its own text ends
    text = torch.tensor(list(b"The statement "), device=device)[None]
    how: Any = {"max_new_tokens": 200 - 10 * rank, "do_sample": True, "temperature": 0.7}
    text = model.generate(text, use_cache=True, **how)  # pyright: ignore
if rank == 0:
    adapters = {name: x for name, x in weights.items() if ".down." in name or ".up." in name}
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(adapters, args.out / "adapters.safetensors")
    trained, everything = (sum(x.numel() for x in d.values()) for d in (adapters, weights))
    print(f"trained {trained:,} of {everything:,} parameters, saved in {args.out}")
    print(f"manual: {after:.3f} bits per byte; before fine-tuning: {before:.3f}")
    print("sample:\n" + bytes(text[0].tolist()).decode(errors="replace"))
