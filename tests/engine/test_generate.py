"""`transformers`' generate() on an engine's module: each rank its own prompt and length."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.engine.parity import SGD, STAGES, here
from tests.ranks import run_ranks

WHY = "generate() is transformers': pip install -e '.[examples]'"
pytest.importorskip("transformers", minversion="5.23", reason=WHY)


def build_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(3)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        config = LlamaConfig(
            vocab_size=32,
            num_attention_heads=2,
            eos_token_id=None,
            pad_token_id=0,
            initializer_range=0.5,
            tie_word_embeddings=True,
            **sizes,
        )
        return LlamaForCausalLM(config).double()


def prompt(rank: int) -> Tensor:
    return torch.arange(1, 4 + 3 * rank)[None]


def generates(stages: tuple[int, ...]) -> None:
    rank, world = here()
    plain = build_llama().eval()
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3 + 4 * rank}
    sampled = {**greedy, "do_sample": True}

    def of(model: Any, given: dict[str, Any], **more: Any) -> Tensor:
        torch.default_generator.manual_seed(rank)
        return model.generate(prompt(rank), **given, **more)

    for stage in stages:
        engine = fzero.Engine(build_llama(), SGD(), fzero.Config(stage=stage, accum_steps=2))
        out = engine(input_ids=prompt(rank), labels=prompt(rank)).loss
        engine.eval()
        for given in (greedy, sampled):
            want = of(plain, given)
            assert want.shape[1] == prompt(rank).shape[1] + given["max_new_tokens"]
            # all ranks go on until the last one has ended
            assert torch.equal(of(engine.module, given, synced_gpus=world > 1), want)
            with engine.local_forward():
                for _ in range(1 + rank):
                    assert torch.equal(of(engine.module, given), want)
        engine.train()
        out.backward()  # and training knows nothing of it
        engine(input_ids=prompt(rank), labels=prompt(rank)).loss.backward()
        engine.step()
        assert engine.global_steps == 1


def test_tokens_are_those_of_the_plain_model() -> None:
    generates((2, 3))
    run_ranks(2, generates, STAGES)
