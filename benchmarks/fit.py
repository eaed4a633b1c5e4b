"""Steps under memory limits: what they hold, and what they compute again for it.

    python -m benchmarks.fit                       # a GPT and transformers' Llama, 12 layers each
    python -m benchmarks.fit --models gpt --limits 4 --worlds 8

For each limit, from the peak of the step without one to the least that can be reached: the peak as
the Program predicts it and as the allocator's events say, whether losses and parameters are those
of the unlimited step bit for bit, and the FLOPs that are computed again, in % of those of forward.
With more than one rank, one process plays one rank of a fake group, whose collectives move nothing.

Then, at world 1 and with SGD, what others recompute, and what a plan does in the same memory:
`torch.utils.checkpoint` on every block, and the min-cut partitioner of torch with several memory
budgets (its own graph of forward and backward, run operator by operator).
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function, boxed_nop_preserve_node_meta
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fzero
from benchmarks.allocations import LocalState, measure
from benchmarks.memory import one_rank_of
from benchmarks.models import GPT, Batch, Size, batch_of
from fzero.program.interop import transformers_is_tracing

GPT_SIZE = Size(vocabulary=1024, width=128, layers=12, heads=4, tokens=64, rows=8)


class Model(NamedTuple):
    """A model to train.

    Args:
        build: makes the module, whose call on a batch gives the loss.
        blocks: of a module, those that a checkpoint would be around, with where they are.
    """

    build: Callable[[], nn.Module]
    blocks: Callable[[nn.Module], nn.ModuleList]


class _Llama(nn.Module):
    """transformers' Llama of 12 layers; its call is the mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        cfg = LlamaConfig(
            vocab_size=GPT_SIZE.vocabulary,
            hidden_size=GPT_SIZE.width,
            intermediate_size=344,
            num_hidden_layers=12,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=GPT_SIZE.tokens,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(cfg)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


MODELS = {
    "gpt": Model(lambda: GPT(GPT_SIZE), lambda module: module.blocks),  # pyright: ignore
    "llama": Model(_Llama, lambda module: module.model.model.layers),  # pyright: ignore
}


class Run:
    """A step function and what it has trained so far."""

    def __init__(self, module: nn.Module, opt: Any, cfg: fzero.Config, batch: Batch) -> None:
        apply, params = fzero.functionalize(module)
        buffers = [{**part._buffers} for part in module.modules()]
        module.to("meta")  # from here on it is only code: the full parameters go
        for part, own in zip(module.modules(), buffers, strict=True):
            part._buffers.update(own)
        self.batch, self.losses = batch, list[Tensor]()
        self.step_fn = fzero.make_train_step(lambda params, batch: apply(params, *batch), opt, cfg)
        self.state = self.step_fn.init(params)

    def __call__(self) -> None:
        self.state = self.step_fn(*self.state, self.batch)
        self.losses.append(self.state[1].metrics["loss"])

    def lower(self) -> fzero.Program:
        """The step's Program."""
        return self.step_fn.lower(*self.state, self.batch)

    def values(self) -> list[Tensor]:
        """Losses and parameters."""
        leaves = [x.to_local() if hasattr(x, "to_local") else x for x in self.state[0].values()]
        return [*self.losses, *leaves]


def trained(
    model: Model, opt: Any, cfg: fzero.Config, change: Callable[[nn.Module], None] | None = None
) -> tuple[LocalState, Run]:
    """Two measured steps."""

    def build() -> Run:
        torch.manual_seed(0)
        module = model.build()
        if change is not None:
            change(module)
        return Run(module, opt, cfg, batch_of(GPT_SIZE, GPT_SIZE.rows))

    return measure(build)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--limits", type=int, default=8)
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--skip-others", action="store_true")
    args = parser.parse_args()
    for name in args.models:
        for world in args.worlds:
            with one_rank_of(world):
                _limits(name, world, args.limits)
        if not args.skip_others:
            _others(name)


def _table(*columns: str) -> None:
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)


def _row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def _limits(name: str, world: int, count: int) -> None:
    opt, cfg = fzero.optim.adamw(1e-3), fzero.Config(stage=3)
    held, run = trained(MODELS[name], opt, cfg)
    program = run.lower()
    peak = program.peak_bytes()
    least = min(point.bytes for point in program.frontier(2)) + 2048
    _table(
        "model",
        "world",
        "limit, bytes",
        "of the peak",
        "predicted",
        "measured",
        "under",
        "same",
        "again",
    )
    forward = _forward_flops(program)
    _row(name, world, "none", "100%", peak, held.peak, "", "", "0.0%")
    for i in range(count):
        limit = round(peak + (least - peak) * i / max(count - 1, 1))
        measured, limited = trained(MODELS[name], opt, cfg.replace(memory_limit=limit))
        step = limited.lower()
        pairs = zip(run.values(), limited.values(), strict=True)
        _row(
            name,
            world,
            limit,
            f"{limit / peak:.0%}",
            step.peak_bytes(),
            measured.peak,
            measured.peak <= limit,
            all(torch.equal(a, b) for a, b in pairs),
            f"{step.cost().recomputed / forward:.1%}",
        )


def _forward_flops(program: fzero.Program) -> int:
    return sum(row.flops for row in program.cost().rows if row.phase == "forward")


def _others(name: str) -> None:
    """What others recompute, and a plan in the same memory."""
    model, opt, cfg = MODELS[name], fzero.optim.sgd(0.1), fzero.Config(stage=0)
    held, run = trained(model, opt, cfg)
    forward = _forward_flops(run.lower())
    _table(
        "model", "who", "added to what is held between steps", "again", "a plan there", "its again"
    )

    def compare(who: str, added: int, again: int) -> None:
        limit = held.between + added
        try:
            measured, limited = trained(model, opt, cfg.replace(memory_limit=limit))
        except fzero.ConfigError as error:
            _row(name, who, added, f"{again / forward:.1%}", "none fits", str(error)[:90])
            return
        mine = limited.lower().cost().recomputed
        there = measured.peak - measured.between
        _row(name, who, added, f"{again / forward:.1%}", there, f"{mine / forward:.1%}")

    def checkpointed(module: nn.Module) -> None:
        blocks = model.blocks(module)
        for i, block in enumerate(blocks):
            blocks[i] = _Checkpointed(block)

    others, blocks = trained(model, opt, cfg, checkpointed)
    compare(
        "checkpoint, each block",
        others.peak - others.between,
        blocks.lower().cost().recomputed,
    )
    for budget, added, again in _min_cut(model):
        compare(f"min-cut, budget {budget}", added, again)


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # Llama asks its layers for settings
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def _min_cut(model: Model) -> Iterator[tuple[float, int, int]]:
    """(budget, bytes added by a forward and backward, FLOPs that are computed again)."""
    base = 0
    for budget in (1.0, 0.8, 0.6, 0.4, 0.2, 0.1):
        functorch_config.activation_memory_budget = budget

        def build() -> Callable[[], None]:
            torch.manual_seed(0)
            # buffers are inputs too: aot_function takes no tensor that it isn't given
            apply, params, buffers = fzero.functionalize(model.build(), buffers=True)
            batch = [*buffers.values(), *batch_of(GPT_SIZE, GPT_SIZE.rows)]
            leaves = [x.requires_grad_() for x in params.values()]

            def loss(*flat: Tensor) -> Tensor:
                own, rest = flat[: len(params)], flat[len(params) :]
                given = dict(zip(buffers, rest, strict=False))
                with transformers_is_tracing():  # or its masks read values
                    out, _ = apply(
                        dict(zip(params, own, strict=True)), given, *rest[len(buffers) :]
                    )
                return out

            compiled = aot_function(
                loss,
                fw_compiler=boxed_nop_preserve_node_meta,
                bw_compiler=boxed_nop_preserve_node_meta,
                partition_fn=min_cut_rematerialization_partition,
            )

            def step() -> None:
                compiled(*leaves, *batch).backward()
                for x in leaves:
                    x.grad = None

            return step

        held, run = measure(build)
        with _counter() as counter:
            run()
        base = base or _plain_flops(model)
        yield budget, held.peak - held.between, counter.get_total_flops() - base


def _counter() -> FlopCounterMode:
    """Torch's, which does not know attention on a CPU, and what has the same count."""
    aten, flash = torch.ops.aten, "_scaled_dot_product_flash_attention"

    def alike(way: str) -> Callable[..., int]:
        def flops(*args: Any, **kwargs: Any) -> int:
            return flop_registry[getattr(aten, f"{flash}{way}")](*args, **kwargs)

        flops._get_raw = True  # pyright: ignore
        return flops

    ways = ("", "_backward")
    return FlopCounterMode(
        display=False,
        custom_mapping={getattr(aten, f"{flash}_for_cpu{way}"): alike(way) for way in ways},
    )


def _plain_flops(model: Model) -> int:
    torch.manual_seed(0)
    module = model.build()
    with _counter() as counter:
        module(*batch_of(GPT_SIZE, GPT_SIZE.rows)).backward()
    return counter.get_total_flops()


if __name__ == "__main__":
    main()
