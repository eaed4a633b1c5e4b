"""`fzero.integrations.transformers`: every run beside the same run of transformers' own Trainer."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    DataCollatorForSeq2Seq,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import fzero
from fzero import tree
from fzero.errors import ConfigError
from fzero.integrations.transformers import Seq2SeqTrainer, Trainer
from tests.ranks import run_fresh

VOCABULARY = 64


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random texts with masked labels, so that rows and ranks count differently many tokens."""

    def __init__(self, rows: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.texts = torch.randint(2, VOCABULARY, (rows, 12), generator=draw)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.texts[index].clone()
        labels[: index % 5] = -100
        return {"input_ids": self.texts[index], "labels": labels}


def _gpt() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout))


def _t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1}
    more: dict[str, Any] = {"num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, **more))


def _lora(kept: list[str] | None = None) -> Any:
    how: Any = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": kept}
    config = LoraConfig(r=4, lora_dropout=0.0, **how)
    torch.manual_seed(0)
    return get_peft_model(_gpt(), config)


def _arguments(folder: str, kind: Any = TrainingArguments, **other: Any) -> Any:
    given = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
    }
    return kind(**{**given, **other})


def _data() -> dict[str, Any]:
    # 50 rows: the last update of an epoch has fewer micro-batches, and the last batch fewer rows
    return {"train_dataset": Tokens(50, 1), "eval_dataset": Tokens(22, 2)}


def _history(trainer: Any) -> list[float]:
    """Losses, norms, rates and evaluations, in order."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_length", "train_loss")
    return [float(row[k]) for row in trainer.state.log_history for k in names if k in row]


def _trained(trainer: Any, **options: Any) -> list[float]:
    trainer.train(**options)
    return _history(trainer)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _same_as_ddp(folder: str) -> dict[str, Any]:
    plain = _trained(transformers.Trainer(_gpt(), _arguments(f"{folder}/plain"), **_data()))
    found: dict[str, Any] = {"plain": plain}
    for stage in (0, 2, 3):
        cfg, model = fzero.Config(stage=stage), _gpt()
        if stage == 2 and _rank():  # a head that each rank has drawn for itself, say
            model.transformer.wte.weight.data.add_(1.0)
        trainer = Trainer(model, _arguments(f"{folder}/{stage}"), **_data(), cfg=cfg)
        found[f"stage {stage}"] = _trained(trainer)
    recomputing = _arguments(f"{folder}/recomputing", gradient_checkpointing=True)
    found["checkpointing"] = _trained(Trainer(_gpt(), recomputing, **_data()))
    return found


def _resumed(folder: str) -> dict[str, Any]:
    saving = {"save_strategy": "steps", "save_steps": 4}
    trainer = Trainer(_gpt(), _arguments(f"{folder}/run", **saving), **_data())
    whole = _trained(trainer)
    trainer.save_model(f"{folder}/final")
    state = trainer.engine.state_dict()  # pyright: ignore[reportOptionalMemberAccess]
    again = Trainer(_gpt(), _arguments(f"{folder}/run", **saving), **_data())
    resumed = _trained(again, resume_from_checkpoint=f"{folder}/run/checkpoint-4")
    found = again.engine.state_dict()  # pyright: ignore[reportOptionalMemberAccess]
    loaded = GPT2LMHeadModel.from_pretrained(f"{folder}/final")
    # the larger loss is the better one here, so that the best model is not the last
    best = {**saving, "load_best_model_at_end": True, "greater_is_better": True}
    third = Trainer(_gpt(), _arguments(f"{folder}/best", **best), **_data())
    third.train()
    return {
        "whole": whole,
        "resumed": resumed,
        "best": (third.evaluate()["eval_loss"], third.state.best_metric, whole),
        "same": all(torch.equal(found[k], x) for k, x in state.items()),
        "loaded": all(torch.equal(x, state[k]) for k, x in loaded.state_dict().items()),
        "files": sorted(os.listdir(f"{folder}/run/checkpoint-4")),
    }


class _Normed(torch.nn.Module):
    """A model with buffers that training moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        del labels
        x = input_ids.to(self.head.weight.dtype) / VOCABULARY
        y = self.head(torch.tanh(self.norm(self.body(x)))).squeeze(-1)
        return {"loss": (y - x.sum(-1)).square().mean(), "logits": y}


def _mixture() -> MixtralForCausalLM:
    """Its experts are one tensor each in files, and stacked in the model."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    experts: dict[str, Any] = {"num_local_experts": 4, "max_position_embeddings": 16}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, **sizes, **heads, **experts))


_MODELS = {
    "gpt": _gpt,
    "mixture": _mixture,
    "normed": _Normed,
    "lora": _lora,
    "kept": lambda: _lora(["ln_f"]),
}
_BEST = [
    (model, stage, bf16, only)
    for model, stage, bf16 in (
        ("normed", 0, False),
        ("normed", 3, False),
        ("gpt", 2, True),
        ("gpt", 3, True),
        ("lora", 3, False),
        ("kept", 2, False),
        ("mixture", 2, True),
    )
    for only in (False, True)
]


def _best(folder: str) -> dict[Any, tuple[float, float, list[float]]]:
    """The best metric, that of the model in the end, and what was seen on the way."""
    found = {}
    for model, stage, bf16, only in _BEST:
        args = _arguments(
            f"{folder}/[{model}] {stage} {only}", eval_steps=2, save_steps=2, learning_rate=0.05,
            save_strategy="steps", load_best_model_at_end=True, metric_for_best_model="eval_loss",
            save_only_model=only, bf16=bf16,
            greater_is_better=model == "normed",  # so that the best is the first and not the last
        )  # fmt: skip
        trainer = Trainer(_MODELS[model](), args, **_data(), cfg=fzero.Config(stage=stage))
        trainer.train()
        seen = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        now = float(trainer.evaluate()["eval_loss"])
        best = trainer.state.best_metric or 0.0
        found[model, stage, bf16, only] = (best, now, seen)
    return found


def _adapted(folder: str, kept: list[str] | None) -> dict[str, Any]:
    plain = _trained(transformers.Trainer(_lora(kept), _arguments(f"{folder}/plain"), **_data()))
    trainer = Trainer(_lora(kept), _arguments(f"{folder}/ours"), **_data())
    ours = _trained(trainer)
    trainer.save_model(f"{folder}/final")
    state = trainer.engine.state_dict()  # pyright: ignore[reportOptionalMemberAccess]
    loaded = PeftModel.from_pretrained(_gpt(), f"{folder}/final").state_dict()
    return {
        "plain": plain,
        "ours": ours,
        "files": sorted(os.listdir(f"{folder}/final")),
        "loaded": all(torch.equal(loaded[k], x) for k, x in state.items()),
    }


def _generated(folder: str) -> dict[str, Any]:
    def lengths(predicted: Any) -> dict[str, float]:
        return {"length": float((predicted.predictions > 0).sum())}

    found = {}
    for name, kind in (("plain", transformers.Seq2SeqTrainer), ("ours", Seq2SeqTrainer)):
        generating = {"predict_with_generate": True, "generation_config": _until(9)}
        args = _arguments(f"{folder}/{name}", Seq2SeqTrainingArguments, **generating)
        model = _t5()
        collator = DataCollatorForSeq2Seq(_NoTokenizer(), model=model)  # pyright: ignore
        trainer = kind(model, args, collator, **_data(), compute_metrics=lengths)
        found[name] = _trained(trainer)
    return found


def _until(length: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=length, decoder_start_token_id=0, pad_token_id=0)


class _NoTokenizer:
    """What a collator asks of a tokenizer, where all rows are equally long."""

    padding_side = "right"

    def pad(self, rows: list[dict[str, Any]], **_: Any) -> dict[str, torch.Tensor]:
        return {k: torch.stack([torch.as_tensor(row[k]) for row in rows]) for k in rows[0]}


def _in_bfloat16(folder: str) -> dict[str, Any]:
    trainer = Trainer(_gpt(), _arguments(folder, bf16=True, save_only_model=True), **_data())
    history = _trained(trainer)
    assert trainer.engine is not None
    kept = {str(x.dtype) for x in tree.leaves(trainer.engine.state[0])}
    return {"history": history, "kept": kept, "computed": trainer.engine.cfg.dtypes.param}


def test_losses_norms_rates_and_evaluations_are_those_under_ddp(tmp_path: Path) -> None:
    for found in run_fresh(2, _same_as_ddp, str(tmp_path), timeout=240):
        plain = found.pop("plain")
        for name, history in found.items():
            assert history == pytest.approx(plain, rel=2e-5), name


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    for found in run_fresh(2, _resumed, str(tmp_path), timeout=240):
        # what was logged until step 4 comes with the checkpoint
        assert found["resumed"][:-1] == found["whole"][:-1]
        assert found["same"]
        assert found["loaded"]
        now, best, history = found["best"]
        assert now == best != min(history[-5:])
        assert {"fzero", "model.safetensors", "scheduler.pt"} <= set(found["files"])


@pytest.mark.slow
def test_the_best_model_is_whole_however_it_was_saved(tmp_path: Path) -> None:
    for found in run_fresh(2, _best, str(tmp_path), timeout=240):
        for case, (best, now, seen) in found.items():
            assert now == best != seen[-1], (case, best, now, seen)


def test_weights_that_lack_what_is_trained_are_refused(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True, "max_steps": 1}
    Trainer(_Normed(), _arguments(str(tmp_path / "other"), **saving), **_data()).train()
    trainer = Trainer(_gpt(), _arguments(str(tmp_path / "gpt"), max_steps=1), **_data())
    trainer.train()
    with pytest.raises(ConfigError, match="is trained"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-1"))


class Images(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random pictures of three kinds."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return {
            "pixel_values": torch.randn(3, 8, 8, generator=draw),
            "labels": torch.tensor(index % 3),
        }


def _vit() -> ViTForImageClassification:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "image_size": 8, "patch_size": 4, "num_labels": 3}
    return ViTForImageClassification(ViTConfig(**sizes))


@pytest.mark.parametrize(("make", "data"), [(_vit, Images()), (_mixture, Tokens(24, 1))])
def test_weights_are_read_whatever_names_their_files_have(
    make: Callable[[], Any], data: Any, tmp_path: Path
) -> None:
    """In a new Trainer, which has no engine yet when it resumes."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    options = {"eval_strategy": "no", "optim": "sgd", "lr_scheduler_type": "constant"}
    torch.manual_seed(0)
    first = Trainer(
        make(), _arguments(str(tmp_path), max_steps=1, **options, **saving), train_dataset=data
    )
    first.train()
    wanted = {name: x.clone() for name, x in first.model.state_dict().items()}
    torch.manual_seed(1)  # another start, which has to give way
    other = Trainer(
        make(),
        _arguments(str(tmp_path / "other"), max_steps=2, learning_rate=0.0, **options),
        train_dataset=data,
    )
    with pytest.warns(UserWarning, match="has no folder 'fzero'"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for name, x in other.model.state_dict().items():
        assert torch.equal(x, wanted[name]), name


@pytest.mark.parametrize(("make", "data"), [(_vit, Images()), (_mixture, Tokens(24, 1))])
@pytest.mark.quick("_mixture-data1")
def test_a_run_resumes_from_its_whole_state_without_a_word(
    make: Callable[[], Any], data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever names the files of its weights have: they are not read."""
    options: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "steps", "save_steps": 1}

    def trained(folder: str, **resume: Any) -> dict[str, torch.Tensor]:
        args = _arguments(str(tmp_path / folder), max_steps=2, **options)
        trainer = Trainer(make(), args, train_dataset=data)
        trainer.train(**resume)
        return trainer.model.state_dict()

    torch.manual_seed(0)
    wanted = trained("run")
    torch.manual_seed(1)  # another start, which has to give way
    told = logging.getLogger("transformers")
    told.addHandler(caplog.handler)
    try:
        found = trained("other", resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    finally:
        told.removeHandler(caplog.handler)
    assert [row.getMessage() for row in caplog.records if row.levelno >= logging.WARNING] == []
    for name, x in found.items():
        assert torch.equal(x, wanted[name]), name


@pytest.mark.parametrize("kept", [None, ["ln_f"]], ids=str)
@pytest.mark.quick("None")
def test_adapters_train_and_are_saved_alone(tmp_path: Path, kept: list[str] | None) -> None:
    for found in run_fresh(2, _adapted, str(tmp_path), kept, timeout=240):
        assert found["ours"] == pytest.approx(found["plain"], rel=2e-5)
        assert "adapter_model.safetensors" in found["files"]
        assert "model.safetensors" not in found["files"]
        assert found["loaded"]


@pytest.mark.slow
def test_texts_are_generated_on_sharded_parameters(tmp_path: Path) -> None:
    for found in run_fresh(2, _generated, str(tmp_path), timeout=240):
        assert found["ours"] == pytest.approx(found["plain"], rel=2e-5)


def test_bf16_computes_in_it_and_updates_in_float32(tmp_path: Path) -> None:
    for found in run_fresh(2, _in_bfloat16, str(tmp_path), timeout=240):
        assert found["kept"] == {"torch.float32"}
        assert found["computed"] == torch.bfloat16
        assert found["history"][0] == pytest.approx(4.0, rel=0.05)


def test_one_process_trains_alone_and_twice(tmp_path: Path) -> None:
    plain = transformers.Trainer(_gpt(), _arguments(str(tmp_path / "a")), **_data())
    ours = Trainer(_gpt(), _arguments(str(tmp_path / "b")), **_data())
    for _ in range(2):
        assert _trained(ours) == pytest.approx(_trained(plain), rel=2e-5)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ({"optim": "adagrad"}, {}, "optim='adagrad'"),
        ({"torch_compile": True}, {}, "torch_compile"),
        ({}, {"cfg": fzero.Config(accum_steps=2)}, "gradient_accumulation_steps"),
        ({}, {"optimizers": (torch.optim.SGD([torch.ones(1)], 0.1), None)}, "optimizers=.*opt="),
        ({}, {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}, "cls_and_kwargs=.*opt="),
    ],
)
def test_what_would_be_passed_over_is_refused(
    tmp_path: Path, arguments: Any, options: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Trainer(_gpt(), _arguments(str(tmp_path), **arguments), **_data(), **options).train()


class _MakesIt(Trainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)  # pyright: ignore
        return self.optimizer


class _NamesIt(Trainer):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        return torch.optim.SGD, {"lr": 0.1}


class _WrapsIt(Trainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        super().create_optimizer(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)  # pyright: ignore
        return self.optimizer


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        (_MakesIt, r"create_optimizer\(\) of this class.*opt="),
        (_WrapsIt, r"create_optimizer\(\) of this class.*opt="),
        (_NamesIt, r"get_optimizer_cls_and_kwargs\(\) of this class.*opt="),
    ],
)
def test_an_optimizer_that_a_class_of_ones_own_makes_is_refused(
    tmp_path: Path, trainer: type[Trainer], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer(_gpt(), _arguments(str(tmp_path)), **_data()).train()


def test_an_optimizer_that_is_assigned_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(_gpt(), _arguments(str(tmp_path)), **_data())
    trainer.optimizer = torch.optim.SGD([torch.ones(1)], 0.1)
    with pytest.raises(ConfigError, match=r"trainer.optimizer = .*opt="):
        trainer.train()


def test_an_optimizer_of_fzeros_is_taken(tmp_path: Path) -> None:
    opt = fzero.optim.inject_hyperparams(fzero.optim.lamb)(lr=1e-3)
    trainer = Trainer(_gpt(), _arguments(str(tmp_path)), **_data(), opt=opt)
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert max(rates) == pytest.approx(1e-3)  # its own, and the schedule's shape
    assert trainer.engine is not None
    assert trainer.engine.lr == pytest.approx(rates[-1] - (rates[-2] - rates[-1]), abs=1e-9)
