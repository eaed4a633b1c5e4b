"""Subjects: models of transformers, peft, torchvision, timm, diffusers and others, at toy size."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.survey.subjects import Built, Subject, called, still

WORDS = 61
_SMALL: dict[str, Any] = {
    # widths
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "d_embed", "vocab_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("ffn_dim", "n_inner", "d_inner", "shared_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_size", "ffn_hidden_size", "intermediate_size_mlp"), 64),
    # depth
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_blocks", "decoder_num_layers"), 2),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim"), 8),
    "attention_head_dim": 8,
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "rope_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 8),
    # words and places
    **dict.fromkeys(("vocab_size", "encoder_vocab_size", "decoder_vocab_size"), WORDS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length"), 32),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "block_size"), 32),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "mask_token_id", "sep_token_id"), 1),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    # state spaces
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    # pictures and sounds
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 8,
}  # fmt: skip
_OTHER: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4, "expand": 2},
    "reformer": {"axial_pos_shape": [4, 2], "axial_pos_embds_dim": [16, 16], "is_decoder": True,
                 "attn_layers": ["local", "lsh"], "num_buckets": 2, "hash_seed": 0,
                 "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4,
                 "attention_head_size": 8},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "use_cache": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "prophetnet": {"use_cache": False},
    "longformer": {"attention_window": [4, 4]},
    "big_bird": {"attention_type": "original_full"},
    "funnel": {"block_sizes": [1, 1], "d_head": 8},
    "xlnet": {"d_head": 8},
    "mpt": {"attn_config": {"attn_pdrop": 0}, "max_seq_len": 32},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
             "max_seq_len": 32},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
              "expert_layer_period": 2, "use_mamba_kernels": False},
    "mamba": {"use_mambapy": False},
    "rwkv": {"attention_hidden_size": 32, "context_length": 32},
    "qwen3_next": {"linear_num_key_heads": 2, "linear_num_value_heads": 4,
                   "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                   "layer_types": ["linear_attention", "full_attention"]},
    "nystromformer": {"num_landmarks": 8, "segment_means_seq_len": 8},
    "mobilebert": {"intra_bottleneck_size": 16, "true_hidden_size": 16},
    "roformer": {"rotary_value": False},
    "wav2vec2": {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3],
                 "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
                 "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0},
    "convnext": {"hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1], "patch_size": 4},
    "convnextv2": {"hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1], "patch_size": 4},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
               "layer_type": "basic"},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
               "groups_width": 8},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2,
             "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2,
               "patch_size": 4},
    "segformer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
                  "num_attention_heads": [1, 2, 2, 2]},
    "pvt": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 2]},
    "poolformer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "focalnet": {"embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32],
                 "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 4},
    "mobilevit": {"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16]},
    "vit_msn": {}, "deit": {}, "dinov2": {}, "beit": {},
}  # fmt: skip
TEXT = {  # by the head
    "CausalLM": (
        *("bloom", "codegen", "cohere", "dbrx", "deepseek_v2", "deepseek_v3", "falcon", "gemma"),
        *("gemma2", "glm", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj"),
        *("granite", "granitemoe", "jamba", "jetmoe", "llama", "mamba", "mamba2", "mistral"),
        *("mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmoe", "openai-gpt", "opt"),
        *("persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        *("qwen3_next", "recurrent_gemma", "reformer", "rwkv", "stablelm", "starcoder2", "xglm"),
        *("xlnet", "zamba", "smollm3", "biogpt", "bitnet", "ernie4_5", "exaone4", "helium"),
        *("lfm2", "minimax", "apertus", "arcee", "diffllama", "doge", "flex_olmo", "gemma3_text"),
    ),
    "MaskedLM": (
        *("albert", "bert", "big_bird", "camembert", "convbert", "deberta", "deberta-v2"),
        *("distilbert", "electra", "ernie", "esm", "fnet", "funnel", "ibert", "longformer"),
        *("mobilebert", "modernbert", "mpnet", "mra", "nystromformer", "rembert", "roberta"),
        *("roformer", "squeezebert", "xlm", "xlm-roberta", "yoso"),
    ),
    "Seq2SeqLM": (
        *("bart", "blenderbot", "led", "longt5", "m2m_100", "marian", "mbart", "mt5", "mvp"),
        *("nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "switch_transformers"),
        *("t5", "umt5"),
    ),
}
PICTURES = (
    *("beit", "convnext", "convnextv2", "deit", "dinov2", "focalnet", "mobilenet_v2"),
    *("mobilevit", "poolformer", "pvt", "regnet", "resnet", "segformer", "swin", "swinv2", "vit"),
    *("vit_msn",),
)
SOUNDS = ("hubert", "sew", "unispeech", "wav2vec2", "wavlm")


def _config(kind: str) -> Any:
    """The config of an architecture, with all that is large made small and no dropout."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    usual = cls()
    given = {}
    for name, value in _SMALL.items():
        settable = name in usual.to_dict() or name in cls.attribute_map
        if settable and type(getattr(usual, name)) in (int, float, type(None)):
            given[name] = value
    for name, value in usual.to_dict().items():
        if type(value) is float and ("drop" in name or name.endswith("pdrop")):
            given[name] = 0.0
    other = _OTHER.get("wav2vec2" if kind in SOUNDS else kind, {})
    config = cls(**{**given, **copy.deepcopy(other), "num_labels": 5})
    for name in ("pad_token_id", "decoder_start_token_id"):
        if getattr(config, name, None) is None:
            setattr(config, name, 0)
    return config


def _text(kind: str, head: str) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        auto = getattr(transformers, f"AutoModelFor{head}")
        ids = torch.randint(3, WORDS, (2, 8))
        batch = {"input_ids": ids, "labels": ids.clone()}
        return Built(still(auto.from_config(_config(kind))), batch, lambda c, b: c(**b).loss)

    return build


def _picture(kind: str) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        if kind == "deit":  # of two classes, which the automatic one doesn't choose between
            module: Any = transformers.DeiTForImageClassification(_config(kind))
        else:
            module = transformers.AutoModelForImageClassification.from_config(_config(kind))
        size = getattr(module.config, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        batch = {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([1, 3])}
        return Built(still(module), batch, lambda c, b: c(**b).loss)

    return build


def _sound(kind: str, head: str) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        module = getattr(transformers, f"AutoModelFor{head}").from_config(_config(kind))
        labels = torch.tensor([[3, 4, 5], [6, 7, 8]]) if head == "CTC" else torch.tensor([1, 3])
        batch = {"input_values": torch.randn(2, 800), "labels": labels}
        return Built(still(module), batch, lambda c, b: c(**b).loss)

    return build


def in_transformers() -> Iterator[Subject]:
    """Language models, pictures and sounds."""
    for head, kinds in TEXT.items():
        for kind in kinds:
            yield Subject(f"{kind}, {head}", "transformers", _text(kind, head))
    for kind in PICTURES:
        yield Subject(kind, "transformers", _picture(kind))
    for kind in SOUNDS:
        for head in ("AudioClassification", "CTC"):
            yield Subject(f"{kind}, {head}", "transformers", _sound(kind, head))


def in_peft() -> Iterator[Subject]:
    """Adapters on a GPT-2, or on a Llama those that want an `nn.Linear`."""
    made: dict[str, dict[str, Any]] = {
        "LoraConfig": {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True},
        "IA3Config": {"target_modules": ["c_attn"], "feedforward_modules": []},
        "LoHaConfig": {"r": 4, "target_modules": ["q_proj"]},
        "LoKrConfig": {"r": 4, "target_modules": ["q_proj"]},
        "AdaLoraConfig": {"target_modules": ["c_attn"], "total_step": 10, "init_r": 4},
        "VeraConfig": {"r": 4, "target_modules": ["c_attn"]},
        "PromptTuningConfig": {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"},
        "PrefixTuningConfig": {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"},
        "PromptEncoderConfig": {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"},
        "BOFTConfig": {"target_modules": ["q_proj"], "boft_block_size": 4},
        "OFTConfig": {"target_modules": ["q_proj"], "oft_block_size": 4},
        "HRAConfig": {"r": 4, "target_modules": ["q_proj"]},
        "FourierFTConfig": {"n_frequency": 8, "target_modules": ["c_attn"]},
        "LNTuningConfig": {"target_modules": ["ln_1"]},
    }

    def adapted(name: str) -> Callable[[], Built]:
        def build() -> Built:
            import peft
            import transformers

            kind = "llama" if made[name].get("target_modules") == ["q_proj"] else "gpt2"
            base = transformers.AutoModelForCausalLM.from_config(_config(kind))
            model: Any = peft.get_peft_model(base, getattr(peft, name)(**made[name]))
            ids = torch.randint(3, WORDS, (2, 8))
            batch = {"input_ids": ids, "labels": ids.clone()}
            return Built(still(model), batch, lambda c, b: c(**b).loss)

        return build

    for name in made:
        yield Subject(name.removesuffix("Config"), "peft", adapted(name))


def in_torchvision() -> Iterator[Subject]:
    """Classifiers, segmentation, video."""
    names = (
        *("alexnet", "vgg11_bn", "resnet18", "resnext50_32x4d", "wide_resnet50_2"),
        *("densenet121", "squeezenet1_0", "mobilenet_v2", "mobilenet_v3_small", "mnasnet0_5"),
        *("shufflenet_v2_x0_5", "efficientnet_b0", "regnet_y_400mf", "googlenet"),
        *("convnext_tiny", "swin_t", "swin_v2_t", "vit_b_32", "maxvit_t"),
        *("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "r3d_18"),
    )

    def of(name: str) -> Callable[[], Built]:
        def build() -> Built:
            import torchvision.models as models  # pyright: ignore[reportMissingImports]

            more: dict[str, Any] = {"weights": None}
            if name in _SEGMENTATION:
                more |= {"weights_backbone": None, "num_classes": 5}
            if name == "googlenet":
                more |= {"init_weights": False, "aux_logits": False}
            size = 224 if name in ("maxvit_t", "vit_b_32") else 64
            shape = (2, 3, 4, 32, 32) if name == "r3d_18" else (2, 3, size, size)
            module = models.get_model(name, **more)
            for part in module.modules():
                if type(part).__name__ == "StochasticDepth":
                    part.p = 0.0
            return called(module, torch.randn(shape))

        return build

    for name in names:
        yield Subject(name, "torchvision", of(name))


_SEGMENTATION = ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")


def in_timm() -> Iterator[Subject]:
    """Classifiers."""
    names = (
        *("resnet10t", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224"),
        *("convnext_atto", "efficientvit_b0", "mobilevit_xxs", "edgenext_xx_small"),
        *("poolformer_s12", "pit_ti_224", "levit_128s", "cait_xxs24_224", "xcit_nano_12_p16_224"),
        *("coat_tiny", "crossvit_tiny_240", "gmlp_ti16_224", "resmlp_12_224"),
        *("swin_tiny_patch4_window7_224", "mobileone_s0", "repvgg_a0", "hrnet_w18_small"),
        *("ghostnet_050", "fbnetc_100", "lcnet_050", "tinynet_e", "regnetx_002", "nfnet_f0"),
        *("volo_d1_224", "beit_base_patch16_224", "eva02_tiny_patch14_224", "fastvit_t8"),
        *("starnet_s1", "mambaout_femto", "rdnet_tiny", "hiera_tiny_224", "tiny_vit_5m_224"),
    )  # fmt: skip

    def of(name: str) -> Callable[[], Built]:
        def build() -> Built:
            import timm  # pyright: ignore[reportMissingImports]

            module = timm.create_model(name, pretrained=False, num_classes=5)
            for part in module.modules():
                if type(part).__name__ == "DropPath":
                    part.drop_prob = 0.0
            size = module.default_cfg["input_size"][-1]
            fixed = module.default_cfg.get("fixed_input_size")
            size = size if fixed or "vit" in name or "patch" in name else min(size, 64)
            return called(module, torch.randn(2, 3, size, size))

        return build

    for name in names:
        yield Subject(name, "timm", of(name))


def in_diffusers() -> Iterator[Subject]:
    """Denoisers and autoencoders."""
    blocks = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}

    def of(name: str, config: dict[str, Any], *args: Any, **kwargs: Any) -> Subject:
        def build() -> Built:
            import diffusers  # pyright: ignore[reportMissingImports]

            return called(getattr(diffusers, name)(**config), *args, **kwargs)

        return Subject(name, "diffusers", build)

    picture, time = torch.randn(2, 4, 16, 16), torch.tensor([3, 7])
    words = torch.randn(2, 5, 16)
    yield of("UNet2DModel", {"in_channels": 4, "out_channels": 4, "sample_size": 16, **blocks,
             "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 4,
             "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}, picture, time)  # fmt: skip
    yield of("UNet2DConditionModel", {"sample_size": 16, **blocks, "cross_attention_dim": 16,
             "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
             "attention_head_dim": 4,
             "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
             picture, time, words)  # fmt: skip
    yield of("AutoencoderKL", {"in_channels": 4, "out_channels": 4, **blocks,
             "down_block_types": ("DownEncoderBlock2D",) * 2,
             "up_block_types": ("UpDecoderBlock2D",) * 2}, picture)  # fmt: skip
    yield of("VQModel", {"in_channels": 4, "out_channels": 4, **blocks, "num_vq_embeddings": 8,
             "down_block_types": ("DownEncoderBlock2D",) * 2,
             "up_block_types": ("UpDecoderBlock2D",) * 2}, picture)  # fmt: skip
    yield of("DiTTransformer2DModel", {"num_attention_heads": 2, "attention_head_dim": 8,
             "in_channels": 4, "num_layers": 2, "sample_size": 16, "norm_num_groups": 4,
             "num_embeds_ada_norm": 10}, picture, time, class_labels=time)  # fmt: skip
    yield of("SD3Transformer2DModel", {"sample_size": 16, "in_channels": 4, "num_layers": 2,
             "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 16,
             "caption_projection_dim": 16, "pooled_projection_dim": 8, "out_channels": 4,
             "pos_embed_max_size": 16}, picture, words, words[:, 0, :8], time)  # fmt: skip
    yield of("PixArtTransformer2DModel", {"num_attention_heads": 2, "attention_head_dim": 8,
             "in_channels": 4, "num_layers": 2, "sample_size": 16, "cross_attention_dim": 16,
             "caption_channels": 16, "out_channels": 4}, picture, words, time,
             added_cond_kwargs={"resolution": None, "aspect_ratio": None})  # fmt: skip
    yield of("UNet1DModel", {"in_channels": 4, "out_channels": 4, "sample_size": 32,
             "block_out_channels": (32, 32, 64), "extra_in_channels": 64},
             torch.randn(2, 4, 32), time)  # fmt: skip


def in_geometric() -> Iterator[Subject]:
    """Layers of graphs: nodes and edges in the batch."""

    def of(name: str, *arguments: Any, **more: Any) -> Subject:
        def build() -> Built:
            import torch_geometric.nn as pyg  # pyright: ignore[reportMissingImports]

            class Net(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.first = nn.Linear(6, 8)
                    self.conv = getattr(pyg, name)(*arguments, **more)

                def forward(self, x: Any, edges: Any) -> Any:
                    return self.conv(self.first(x).relu(), edges)

            return called(Net(), torch.randn(10, 6), torch.randint(10, (2, 30)))

        return Subject(name, "torch_geometric", build)

    for name in ("GCNConv", "SAGEConv", "GraphConv", "GATConv", "GATv2Conv", "TransformerConv",
                 "ChebConv", "TAGConv", "ARMAConv", "LEConv", "ClusterGCNConv", "GENConv",
                 "ResGatedGraphConv", "SGConv", "FiLMConv", "GeneralConv"):  # fmt: skip
        yield of(name, 8, 4, **({"K": 2} if name == "ChebConv" else {}))
    yield of("GINConv", nn.Linear(8, 4))
    yield of("EdgeConv", nn.Linear(16, 4))
    yield of("GCN", 8, 8, 2)
    yield of("GraphSAGE", 8, 8, 2)
    yield of("GAT", 8, 8, 2)


def in_torchdiffeq() -> Iterator[Subject]:
    """Solvers of a neural ODE."""

    def of(method: str, adjoint: bool) -> Subject:
        def build() -> Built:
            import torchdiffeq  # pyright: ignore[reportMissingImports]

            class Field(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

                def forward(self, t: Any, y: Any) -> Any:
                    return self.body(y)

            class Flow(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.field = Field()

                def forward(self, y: Any) -> Any:
                    solve = torchdiffeq.odeint_adjoint if adjoint else torchdiffeq.odeint
                    return solve(self.field, y, torch.linspace(0, 1, 3), method=method)[-1]

            return called(Flow(), torch.randn(4, 4))

        return Subject(f"{method}{', adjoint' * adjoint}", "torchdiffeq", build)

    for method in ("euler", "rk4", "dopri5"):
        for adjoint in (False, True):
            yield of(method, adjoint)


def in_kornia() -> Iterator[Subject]:
    """Filters, losses and features of pictures."""

    def of(
        name: str, where: str, *arguments: Any, shape: tuple[int, ...] = (2, 3, 32, 32)
    ) -> Subject:
        def build() -> Built:
            import kornia  # pyright: ignore[reportMissingImports]

            from benchmarks.survey.in_torch import Scaled

            module = getattr(getattr(kornia, where), name)(*arguments)
            more = [torch.rand(shape)] if where == "losses" else []
            return called(Scaled(module), torch.rand(shape), *more)

        return Subject(name, "kornia", build)

    yield of("GaussianBlur2d", "filters", (3, 3), (1.5, 1.5))
    yield of("Sobel", "filters")
    yield of("Canny", "filters")
    yield of("Laplacian", "filters", 3)
    yield of("MedianBlur", "filters", (3, 3))
    yield of("RgbToHsv", "color")
    yield of("RgbToLab", "color")
    yield of("SSIMLoss", "losses", 5)
    yield of("PSNRLoss", "losses", 1.0)
    yield of("CharbonnierLoss", "losses")
    yield of("HardNet", "feature", False, shape=(2, 1, 32, 32))
    yield of("SOSNet", "feature", False, shape=(2, 1, 32, 32))


def subjects() -> Iterator[Subject]:
    """All of them; what isn't installed is for the caller to leave out."""
    for part in (in_transformers, in_peft, in_torchvision, in_timm, in_diffusers, in_geometric,
                 in_torchdiffeq, in_kornia):  # fmt: skip
        yield from part()
